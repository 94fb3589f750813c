"""`kvloom bench NAME …`: runs a benchmark as a process of its own, by module name."""

import subprocess
import sys
from argparse import REMAINDER, ArgumentParser, Namespace, _SubParsersAction

from cp_client.interpreter import same_code_environment

BENCHMARKS = (
    "attention",
    "chooser",
    "collectives",
    "compare",
    "decode",
    "layout",
    "matrices",
    "memory",
    "mla",
    "pd-waste",
    "prefill",
    "second-token",
    "serve",
    "shapes",
    "transfer",
    "zigzag",
)


def add_bench_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    """Adds `bench NAME …`; sets `func(args) -> exit status`."""
    parser = subparsers.add_parser("bench", help="measure", description="`kvloom bench NAME --help` shows the flags of one.")
    parser.add_argument("name", choices=BENCHMARKS, metavar=f"{{{','.join(BENCHMARKS)}}}")
    parser.add_argument("words", nargs=REMAINDER, metavar="…", help="flags of the benchmark, e.g. --json")
    parser.set_defaults(func=bench)


def bench(args: Namespace) -> int:
    """The exit status of the benchmark."""
    return subprocess.call(
        [sys.executable, "-m", f"benchmarks.{args.name.replace('-', '_')}", *args.words], env=same_code_environment()
    )
