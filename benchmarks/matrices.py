"""Products with a rank's bf16 matrices, without a cluster: `python -m benchmarks.matrices`.

A case is FEATURESxINPUTS; `gate` stands before those of a gated FFN, silu(x·Gᵀ) · x·Uᵀ. Ways, in turn within a run, each over
as many matrices as keep them out of the processor's cache: kvloom; torch over the same row-major weights; oneDNN over
weights in its own order, where it has one. With one thread, times are those that the processor spends on it, so that other
work on the machine counts little; with more they are the clock's.
"""

import re
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import integers, machine, parser, report, run_benchmark, spread
from cp_wire.flags import integer
from cp_wire.words import counted
from rank_server.models.linear import gated, linear

CASES = "960x576,576x576,gate1536x576,576x1536,49152x576"
"""SmolLM2-135M."""
COLD_BYTES = 100_000_000
FEWEST = 3
"""Matrices, where they are large."""
Way = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Case:
    """Matrices of one shape."""

    features: int
    inputs: int
    gated: bool = False

    @classmethod
    def parse(cls, text: str) -> "Case":
        """From FEATURESxINPUTS or gateFEATURESxINPUTS."""
        match = re.fullmatch(r"(gate)?([1-9]\d*)x([1-9]\d*)", text)
        if match is None:
            raise ArgumentTypeError(f"{text!r} is not FEATURESxINPUTS or gateFEATURESxINPUTS")
        return cls(int(match[2]), int(match[3]), match[1] is not None)

    def __str__(self) -> str:
        return f"{'gate' if self.gated else ''}{self.features}x{self.inputs}"

    @property
    def numbers(self) -> int:
        """Of all matrices of a product."""
        return self.features * self.inputs * (2 if self.gated else 1)


def ways(case: Case, rows: int) -> dict[str, Way]:
    """Name → product with the i-th matrix."""
    generator = torch.Generator().manual_seed(1)
    count = max(FEWEST, COLD_BYTES // (2 * case.numbers))
    heights = [case.features] * (2 if case.gated else 1)
    of_one = sum(heights), case.inputs
    x = torch.randn(rows, case.inputs, generator=generator).to(torch.bfloat16)

    def weights() -> list[tuple[Tensor, ...]]:
        return [torch.randn(of_one, generator=generator).to(torch.bfloat16).split(heights) for _ in range(count)]

    def torchs(matrices: tuple[Tensor, ...]) -> Tensor:
        if len(matrices) == 1:
            return functional.linear(x, matrices[0])
        return functional.silu(functional.linear(x, matrices[0])).mul_(functional.linear(x, matrices[1]))

    def packeds(matrices: tuple[Tensor, ...]) -> Tensor:
        product = torch.ops.mkldnn._linear_pointwise
        if len(matrices) == 1:
            return product(x, matrices[0], None, "none", [], "")
        return product.binary(x, product(x, matrices[0], None, "swish", [], ""), matrices[1], None, "mul")

    ours = [gated(*each) if case.gated else linear(*each) for each in weights()]
    plain = weights()
    found: dict[str, Way] = {
        "kvloom": lambda i: ours[i % count](x),
        "torch": lambda i: torchs(plain[i % count]),
    }
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = [tuple(torch.ops.mkldnn._reorder_linear_weight(w, 1) for w in each) for each in weights()]
        found["oneDNN, own order"] = lambda i: packeds(packed[i % count])
    return found


@torch.inference_mode()
def measure(case: Case, rows: int, runs: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Times in µs of a product; ratios of kvloom's median to the others'."""
    of_ways = ways(case, rows)
    times: dict[str, list[float]] = {name: [] for name in of_ways}
    for run in range(runs + 1):
        for name, way in of_ways.items():
            begun = clock()
            way(run)
            taken = clock() - begun
            if run > 0:
                times[name].append(taken * 1e6)
    found: dict[str, Any] = {name: {"us": spread(values)} for name, values in times.items()}
    for entry in found.values():
        median = entry["us"]["median"]
        entry["gb_per_s"] = round(2 * case.numbers / median / 1e3, 1)
        entry["gflop_per_s"] = round(2 * case.numbers * rows / median / 1e3, 1)
        entry["kvloom_ratio"] = round(found["kvloom"]["us"]["median"] / median, 3)
    return {"case": str(case), "rows": rows, "ways": found}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser("matrices", "products with a rank's bf16 matrices")
    flags.add_argument(
        "--cases",
        type=lambda text: [Case.parse(word) for word in text.split(",")],
        default=CASES,
        help="FEATURESxINPUTS or gateFEATURESxINPUTS, comma-separated (default: %(default)s)",
    )
    flags.add_argument("--rows", type=integers(1), default="1,4,8,32,512", help="of x, comma-separated (default: %(default)s)")
    flags.add_argument("--threads", type=integer(1), default=1, help="of torch (default: 1)")
    flags.add_argument("--runs", type=integer(1), default=30, help="measured products of each way, in turn (default: 30)")
    args = flags.parse_args(argv)
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    cases = [measure(case, rows, args.runs, clock) for rows in args.rows for case in args.cases]
    document = {"benchmark": "matrices", "machine": machine(), "threads": args.threads, "runs": args.runs, "cases": cases}
    kind = "CPU time" if args.threads == 1 else "wall time"
    lines = [f"{counted(args.threads, 'thread')}, bf16, {kind}; µs per product, kvloom ÷ way"]
    for entry in cases:
        lines.append(f"{entry['rows']} × {entry['case']}")
        lines += [
            f"  {name:<18} {way['us']['median']:9.0f} ({way['us']['min']:.0f}–{way['us']['max']:.0f}) µs "
            f"{way['gb_per_s']:6.1f} GB/s {way['gflop_per_s']:6.1f} GFLOP/s  ÷ {way['kvloom_ratio']:.2f}"
            for name, way in entry["ways"].items()
        ]
    report(args, document, lines)
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
