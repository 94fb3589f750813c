"""`kvloom`: the command line.

Each command's module is imported only when that command is asked for: `explain` answers without gRPC, `generate`
without the model files. Nothing but the guard is imported before it stands, so that Ctrl-C finds no moment of its own.
"""

from __future__ import annotations

import sys

from cp_client.guard import guarded, interruptible

TYPE_CHECKING = False
"""What `typing` has under this name; it would take milliseconds to import."""
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cp_wire.command_line import CommandParser

COMMANDS = {
    "up": ("cp_client.up_command", "add_up_parser", "start a cluster on this host"),
    "generate": ("cp_client.generate_command", "add_generate_parser", "answer one prompt"),
    "status": ("cp_client.status_command", "add_status_parser", "ranks, groups and queues of a cluster"),
    "explain": ("cp_client.explain", "add_explain_parser", "show where tokens, blocks and ranks lie"),
    "check": ("cp_client.check", "add_check_parser", "judge a configuration before anything starts"),
    "bench": ("cp_client.bench_command", "add_bench_parser", "measure"),
}
"""Command → (module, function that adds its parser, summary). The parser sets `func(args) -> exit status`."""


def build_parser(command: str | None) -> CommandParser:
    """The parser with the full flags of `command` alone; the others are listed only."""
    from importlib import import_module

    from cp_wire.command_line import CommandParser

    parser = CommandParser(prog="kvloom", description="Long-context serving over interleaved KV shards.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, function, summary) in COMMANDS.items():
        if name == command:
            add: Callable[[object], None] = getattr(import_module(module), function)
            add(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status: 0 done, 2 refused, 1 failed."""
    words = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(words))


def _run(words: list[str]) -> int:
    parser = interruptible(lambda: build_parser(words[0] if words else None))
    args = parser.parse_args(words)
    status: int = args.func(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
