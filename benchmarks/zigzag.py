"""Attention of a prompt cut head-tail over the members of a group, against contiguous cuts: `kvloom bench zigzag`.

A case is QUERIES@CONTEXT: one chunk of a prompt after so many cached tokens. Each member's rows go through the rank's own
kernels, over keys that are all there, as when keys travel; one member after the other in this process. Times are CPU times of
one thread, the best of several passes in turn, so that other work on the machine hardly shows. A group waits for its slowest
member.
"""

import re
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.attention import BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS, SCALE
from benchmarks.harness import machine, parser, report, run_benchmark
from cp_layout.cuts import cut
from cp_layout.zigzag import BatchRow, partition
from cp_wire.flags import integer
from cp_wire.words import percent
from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.attention.cpu import CpuKernels
from rank_server.kv_pool import KvPool

DEFAULT_CASES = "2048@0,4096@0,8192@0,512@0,512@7680"

Pieces = list[tuple[int, int]]
"""(absolute position of the first token, tokens) of each run of a member."""


class Case(NamedTuple):
    """One chunk of a prompt."""

    queries: int
    context: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """From QUERIES@CONTEXT."""
        match = re.fullmatch(r"([1-9]\d*)@(\d+)", text)
        if match is None:
            raise ArgumentTypeError(f"{text!r} is not QUERIES@CONTEXT")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"{self.queries}@{self.context}"


def cuts(case: Case, members: int) -> dict[str, list[Pieces]]:
    """What each member computes, by the kind of cut; a member without rows has no pieces."""
    dealt = partition([BatchRow(case.context, case.queries)], members)
    zigzag = [
        list(zip(dealt.piece_start[own].tolist(), dealt.piece_length[own].tolist(), strict=True))
        for own in map(dealt.pieces_of, range(members))
    ]
    ranges = [cut(case.queries, members, member) for member in range(members)]
    contiguous = [[(case.context + first, last - first)] if last > first else [] for first, last in ranges]
    return {"zigzag": zigzag, "contiguous": contiguous}


class Attention:
    """A cache that holds a case's keys, and the rows of one member at a time over it."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(1)
        blocks = -(-(case.context + case.queries) // BLOCK_SIZE)
        self._table = torch.arange(blocks)
        self._pool = KvPool(1, blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, torch.bfloat16, "cpu")
        slots = torch.arange(blocks * BLOCK_SIZE)
        k, v = (torch.randn(len(slots), KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
        self._pool.write(0, k, v, slots)
        self._q = torch.randn(case.queries, HEADS, HEAD_DIM, generator=generator).to(torch.bfloat16)
        self._kernels = CpuKernels(use_threads=False)

    def of(self, pieces: Pieces) -> Callable[[], tuple[Tensor, Tensor]]:
        """A call that attends for these rows."""
        rows, visible, first = [], [torch.empty(0, dtype=torch.int64)], 0
        for start, length in pieces:
            rows.append(AttentionRow(first, length, self._table, start + length, start + 1))
            visible.append(torch.arange(start + 1, start + length + 1))
            first += length
        q, batch = self._q[:first], AttentionBatch(tuple(rows), torch.full((first,), -1), torch.cat(visible))
        return lambda: self._kernels.paged(q, *self._pool.cache(0), batch, SCALE)


def cpu_ms(calls: Mapping[str, Sequence[Callable[[], object]]], runs: int) -> dict[str, list[float]]:
    """Least CPU time of this thread per call, in turn, after one pass that does not count."""
    best = {name: [float("inf")] * len(each) for name, each in calls.items()}
    for run in range(runs + 1):
        for name, each in calls.items():
            for index, call in enumerate(each):
                begun = time.thread_time()
                call()
                if run:
                    best[name][index] = min(best[name][index], (time.thread_time() - begun) * 1000)
    return best


def compared(case: Case, ms: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Per cut the members' times, the slowest, and how far they lie apart as part of it; the ratio of the two slowest."""
    row: dict[str, Any] = {"case": str(case)}
    for name, times in ms.items():
        slowest = max(times)
        row[name] = {
            "member_ms": [round(each, 3) for each in times],
            "slowest_ms": round(slowest, 3),
            "spread": round((slowest - min(times)) / slowest, 4),
        }
    row["ratio"] = round(max(ms["contiguous"]) / max(ms["zigzag"]), 3)
    return row


def measure(case: Case, members: int, runs: int) -> dict[str, Any]:
    """One case in both cuts."""
    attention = Attention(case)
    calls = {name: [attention.of(pieces) for pieces in each] for name, each in cuts(case, members).items()}
    return compared(case, cpu_ms(calls, runs))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser("zigzag", "attention of a prompt cut head-tail and contiguously")
    flags.add_argument(
        "--cases",
        type=lambda text: [Case.parse(word) for word in text.split(",")],
        default=DEFAULT_CASES,
        help="QUERIES@CONTEXT, comma-separated (default: %(default)s)",
    )
    flags.add_argument("--members", type=integer(2), default=2, help="of the group (default: 2)")
    flags.add_argument("--runs", type=integer(1), default=5, help="passes, of which the best counts (default: 5)")
    args = flags.parse_args(argv)
    torch.set_num_threads(1)
    rows = [measure(case, args.members, args.runs) for case in args.cases]
    document = {"benchmark": "zigzag", "machine": machine(), "members": args.members, "runs": args.runs, "rows": rows}
    lines = [f"{args.members} members, {HEADS} query and {KV_HEADS} KV heads of {HEAD_DIM}, bf16; CPU ms of a layer per member"]
    lines += [
        f"{row['case']:>10}: zigzag {row['zigzag']['member_ms']} (spread {percent(row['zigzag']['spread'])}), "
        f"contiguous {row['contiguous']['member_ms']}; slowest × {row['ratio']:.2f}"
        for row in rows
    ]
    report(args, document, lines)
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
