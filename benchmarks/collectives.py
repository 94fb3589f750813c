"""What a collective costs over TCP and in shared memory: `kvloom bench collectives`.

One process per member, every member in both groups; for each operation and size blocks of calls of gloo and shm in turn, so
that a drift of the machine meets both alike. Times are member 0's, per call; the ratio is that of the medians.
"""

import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from benchmarks.endings import ending_at_once
from benchmarks.harness import integers, machine, parser, report, run_benchmark
from benchmarks.member import start_member
from cp_wire.flags import integer
from cp_wire.words import counted
from rank_server.collectives.base import Group
from rank_server.collectives.table import backends

HOST = "127.0.0.1"
BACKENDS = ("gloo", "shm")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = (4096, 65536, 1048576)
OPEN_S = 60.0
WARM_UP = 3


@contextmanager
def open_groups(args: Namespace) -> Iterator[dict[str, Group]]:
    """This member's end of one group per backend, by name. Member 0 starts the others and waits for their end.

    Nobody outlives member 0. While groups open, a signal ends it at once: a handler would wait for the others with it.
    """
    index, *bootstraps = args.join
    table = {name: backends(HOST)[name]() for name in BACKENDS}
    ranks = range(args.members)
    others: list[subprocess.Popen[bytes]] = []
    if index == "0":
        bootstraps = [table[name].prepare(name, ranks).decode() for name in BACKENDS]
        sizes = ",".join(map(str, args.sizes))
        same = ["--members", args.members, "--sizes", sizes, "--blocks", args.blocks, "--calls", args.calls]
        words = [*map(str, same), "--join"]
        others += [start_member("benchmarks.collectives", *words, str(other), *bootstraps) for other in ranks[1:]]
    groups: dict[str, Group] = {}
    try:
        with ending_at_once():
            for name, bootstrap in zip(BACKENDS, bootstraps, strict=True):
                groups[name] = table[name].open(name, ranks, int(index), bootstrap.encode(), OPEN_S)
        yield groups
        groups["shm"].barrier()
    except BaseException:
        for other in others:
            other.kill()
        raise
    finally:
        for group in groups.values():
            group.close()
        for other in others:
            other.wait(OPEN_S)


def block_us(call: Callable[[], Any], calls: int) -> list[float]:
    """Durations of so many calls, in µs, after a few that are not counted."""
    times = []
    for number in range(-WARM_UP, calls):
        begun = time.perf_counter()
        call()
        if number >= 0:
            times.append((time.perf_counter() - begun) * 1e6)
    return times


def measure(groups: dict[str, Group], op: str, size: int, blocks: int, calls: int) -> dict[str, Any]:
    """Times of one operation on tensors of `size` bytes under both backends."""
    members = groups["shm"].size
    x = torch.ones(members, size // 4 // members)
    times: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for _ in range(blocks):
        for name in BACKENDS:
            times[name] += block_us(lambda name=name: getattr(groups[name], op)(x), calls)  # type: ignore[misc]
    row: dict[str, Any] = {"op": op, "bytes": size}
    for name in BACKENDS:
        row[f"{name}_us"] = {"median": round(median(times[name]), 1), "p10": _percentile(times[name], 10)}
    row["ratio"] = round(row["shm_us"]["median"] / row["gloo_us"]["median"], 4)
    return row


def _percentile(values: Sequence[float], percent: int) -> float:
    return round(sorted(values)[len(values) * percent // 100], 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser("collectives", "cost of a collective over TCP and in shared memory")
    flags.add_argument("--members", type=integer(2), default=2, help="processes (default: 2)")
    flags.add_argument(
        "--sizes",
        type=integers(4),
        default=SIZES,
        help="bytes of a member's tensor, comma-separated (default: 4096,65536,1048576)",
    )
    flags.add_argument("--blocks", type=integer(1), default=5, help="blocks of calls per backend (default: 5)")
    flags.add_argument("--calls", type=integer(1), default=40, help="calls in a block (default: 40)")
    flags.add_argument("--join", nargs="+", default=["0"], metavar="…", help="what member 0 gives to the members it starts")
    args = flags.parse_args(argv)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // args.members))
    with open_groups(args) as groups:
        rows = [measure(groups, op, size, args.blocks, args.calls) for op in OPERATIONS for size in args.sizes]
    if args.join[0] != "0":
        return 0
    document = {
        "benchmark": "collectives",
        "machine": machine(),
        "members": args.members,
        "calls": args.blocks * args.calls,
        "rows": rows,
    }
    lines = [f"{args.members} members, {counted(args.blocks * args.calls, 'call')} each, medians in µs (fastest tenth)"]
    lines += [
        f"{row['op']:>14} {row['bytes']:>9} B: "
        + "  ".join(f"{name} {row[f'{name}_us']['median']:>8.1f} ({row[f'{name}_us']['p10']:.1f})" for name in BACKENDS)
        + f"  shm/gloo {row['ratio']:.3f}"
        for row in rows
    ]
    report(args, document, lines)
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
