"""`kvloom bench NAME`: runs a benchmark module in a process of its own, because nothing may import the benchmarks."""

import subprocess
import sys
from argparse import REMAINDER, ArgumentParser, Namespace, _SubParsersAction

BENCHMARKS = ("decode", "layout")


def add_bench_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    """Adds `bench NAME …`; sets `func(args) -> exit status`."""
    parser = subparsers.add_parser("bench", help="measure", add_help=False)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("rest", nargs=REMAINDER, help="flags of the benchmark, e.g. --json")
    parser.set_defaults(func=bench)


def bench(args: Namespace) -> int:
    """The benchmark's own exit status."""
    return subprocess.run([sys.executable, "-m", f"benchmarks.{args.name}", *args.rest], check=False).returncode
