"""`kvloom bench NAME …`: the process becomes the benchmark, found by module name."""

import os
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
    """Does not return. No process stands between a signal and the benchmark, which knows what it has started."""
    words = [sys.executable, "-m", f"benchmarks.{args.name.replace('-', '_')}", *args.words]
    os.execve(sys.executable, words, same_code_environment())
