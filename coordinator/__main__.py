"""`python -m coordinator`: the coordinator process."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from coordinator.app import Coordinator, Options
from coordinator.settings import effective_config
from coordinator.text import TextEdge
from coordinator.timings import Timings
from cp_wire import process
from cp_wire.command_line import ProcessParser
from cp_wire.flags import add_cluster_flags, add_metrics_flag, check_ports, integer
from cp_wire.logs import configure_logging
from cp_wire.sides import sides_from
from model_files import ModelRefused, open_model


def build_parser() -> argparse.ArgumentParser:
    """Flags of the coordinator process."""
    parser = ProcessParser(prog="python -m coordinator", description="The kvloom process that decides.")
    parser.add_argument("--model", required=True, help="Hugging Face directory or GGUF file")
    parser.add_argument("--port", type=integer(0, 65535), default=0, help="0 = the system chooses (default)")
    parser.add_argument(
        "--start-timeout", type=integer(1), default=600, metavar="S", help="seconds from listening to serving (default: 600)"
    )
    parser.add_argument(
        "--drain-timeout", type=integer(0), default=5, metavar="S", help="seconds for requests at SIGTERM (default: 5)"
    )
    parser.add_argument("--exit-with-stdin", action="store_true", help="stop when standard input closes")
    add_metrics_flag(parser)
    add_cluster_flags(parser)
    return parser


async def serve(args: argparse.Namespace) -> int:
    """Runs until a signal; raises what keeps the cluster from starting."""
    check_ports(args)
    model = open_model(args.model)
    sides = sides_from(args, lambda asked: effective_config(asked, model))
    options = Options(
        host=args.host,
        port=args.port,
        seed=args.seed,
        recompute_lost_kv=args.kv_load_failure_policy == "recompute",
        metrics_port=args.metrics_port,
    )
    text = await asyncio.to_thread(TextEdge, model)
    coordinator = Coordinator(sides, model.shape, text, options, Timings(start_s=args.start_timeout))
    if args.exit_with_stdin:
        process.watch_stdin_eof()
    async with coordinator.running() as address:
        print(f"listening grpc={address}", flush=True)
        try:
            await coordinator.ready()
            print(f"ready grpc={address}", flush=True)
            await coordinator.failed()
        except asyncio.CancelledError:
            await coordinator.drain(args.drain_timeout)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = build_parser().parse_args(argv)
    configure_logging("coordinator")
    return process.run(lambda: serve(args), refusals=(ModelRefused,))


if __name__ == "__main__":
    sys.exit(main())
