"""Partial attention over the paged cache, without a cluster: `python -m benchmarks.attention`.

A case is ROWSxQUERIES@CONTEXT: so many requests, each with so many new tokens after so many cached ones. Ways, in turn within
a run: kvloom over consecutive and over scattered blocks; torch's flash operation over keys turned into fp32, the queries
of a KV head packed into one matrix, and in bf16; `scaled_dot_product_attention` in bf16 as model code calls it; for decode
rows also a bare read of the same keys and values. GFLOP/s count 4·D per query head and visible (query, key) pair.
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

from benchmarks.harness import machine, parser, report, run_benchmark, spread
from cp_wire.flags import integer
from cp_wire.words import counted
from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.attention.cpu import CpuKernels
from rank_server.kv_pool import KvPool

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LAYERS = 9, 3, 64, 16, 30
"""SmolLM2-135M."""
SCALE = HEAD_DIM**-0.5
PREFILL_LAYERS = 2
DEFAULT_CASES = "1x1@512,1x1@2048,1x1@8192,16x1@512,64x1@128,1x512@0,1x512@2048,1x512@7680"


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of the same size in one step."""

    rows: int
    queries: int
    context: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """From ROWSxQUERIES@CONTEXT."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)@(\d+)", text)
        if match is None:
            raise ArgumentTypeError(f"{text!r} is not ROWSxQUERIES@CONTEXT")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"{self.rows}x{self.queries}@{self.context}"

    @property
    def tokens(self) -> int:
        """Keys of a request, its new tokens included."""
        return self.context + self.queries

    @property
    def layers(self) -> int:
        """As many as keep the cache of decode rows out of the processor's."""
        return LAYERS if self.queries == 1 else PREFILL_LAYERS

    @property
    def flop(self) -> int:
        """Of one layer."""
        pairs = self.queries * self.context + self.queries * (self.queries + 1) // 2
        return 4 * HEAD_DIM * HEADS * self.rows * pairs


class Workload:
    """Tensors of a case and the ways to attend; a way takes a layer."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(1)
        columns = -(-case.tokens // BLOCK_SIZE)
        blocks = case.rows * columns
        pool = KvPool(case.layers, blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, torch.bfloat16, "cpu")
        slots = torch.arange(blocks * BLOCK_SIZE)
        for layer in range(case.layers):
            k, v = (torch.randn(len(slots), KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
            pool.write(layer, k, v, slots)
        self._pool = pool
        self._q = torch.randn(case.rows * case.queries, HEADS, HEAD_DIM, generator=generator).to(torch.bfloat16)
        visible = torch.arange(case.context + 1, case.tokens + 1)
        self._consecutive = self._batch(torch.arange(blocks).view(case.rows, columns), visible)
        self._scattered = self._batch(torch.randperm(blocks, generator=generator).view(case.rows, columns), visible)
        hidden = torch.arange(case.tokens) >= visible.unsqueeze(1)
        self._mask = None if case.queries == 1 else torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[None, None]

    def _batch(self, tables: Tensor, visible: Tensor) -> AttentionBatch:
        queries = self.case.queries
        rows = [
            AttentionRow(i * queries, queries, table, self.case.tokens, self.case.context + 1) for i, table in enumerate(tables)
        ]
        tokens = queries * self.case.rows
        return AttentionBatch(tuple(rows), torch.full((tokens,), -1), visible.repeat(self.case.rows))

    def ways(self) -> dict[str, Callable[[int], object]]:
        """Name → call of one layer."""
        kernels = CpuKernels()
        found: dict[str, Callable[[int], object]] = {
            "kvloom": lambda layer: kernels.paged(self._q, *self._pool.cache(layer), self._consecutive, SCALE),
            "kvloom, scattered": lambda layer: kernels.paged(self._q, *self._pool.cache(layer), self._scattered, SCALE),
            "flash fp32": lambda layer: [self._flash_fp32(*each) for each in self._dense(layer)],
            "flash bf16": lambda layer: [self._flash_bf16(*each) for each in self._dense(layer)],
            "sdpa bf16": lambda layer: [self._sdpa(*each) for each in self._dense(layer)],
        }
        if self.case.queries == 1:
            found["read"] = lambda layer: [cache.view(torch.float32).sum() for cache in self._pool.cache(layer)]
        return found

    def _dense(self, layer: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Per request q [1, H, q, D] and k, v [1, KVH, n, D], views."""
        caches = [
            cache.view(self.case.rows, -1, KV_HEADS, HEAD_DIM)[:, : self.case.tokens] for cache in self._pool.cache(layer)
        ]
        q = self._q.view(self.case.rows, self.case.queries, HEADS, HEAD_DIM)
        return [tuple(x[i : i + 1].transpose(1, 2) for x in (q, *caches)) for i in range(self.case.rows)]  # type: ignore[misc]

    def _flash_fp32(self, q: Tensor, k: Tensor, v: Tensor) -> object:
        share = HEADS // KV_HEADS
        packed = q.float().view(KV_HEADS, share, -1, HEAD_DIM).transpose(1, 2).reshape(1, KV_HEADS, -1, HEAD_DIM)
        mask = None if self._mask is None else self._mask.repeat_interleave(share, 2)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(packed, k.float(), v.float(), attn_mask=mask, scale=SCALE)

    def _flash_bf16(self, q: Tensor, k: Tensor, v: Tensor) -> object:
        mask = None if self._mask is None else self._mask.to(q.dtype)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=SCALE)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor) -> object:
        mask = None if self._mask is None else self._mask.to(q.dtype)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)


def measure(case: Case, runs: int) -> dict[str, Any]:
    """Times in ms of one layer; ratios to kvloom's median."""
    ways = Workload(case).ways()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(runs + 1):
        for name, way in ways.items():
            begun = time.perf_counter()
            for layer in range(case.layers):
                way(layer)
            if run > 0:
                times[name].append((time.perf_counter() - begun) / case.layers * 1e3)
    found: dict[str, Any] = {}
    for name, values in times.items():
        ms = spread(values)
        found[name] = {"ms": ms, "gflop_per_s": round(case.flop / ms["median"] / 1e6, 1)}
    for entry in found.values():
        entry["kvloom_ratio"] = round(found["kvloom"]["ms"]["median"] / entry["ms"]["median"], 3)
    return {"case": str(case), "layers": case.layers, "ways": found}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser("attention", "attention over the paged cache")
    flags.add_argument(
        "--cases",
        type=lambda text: [Case.parse(word) for word in text.split(",")],
        default=DEFAULT_CASES,
        help="ROWSxQUERIES@CONTEXT, comma-separated (default: %(default)s)",
    )
    flags.add_argument("--threads", type=integer(1), default=1, help="of torch (default: 1)")
    flags.add_argument("--runs", type=integer(1), default=5, help="measured passes of each way, in turn (default: 5)")
    args = flags.parse_args(argv)
    torch.set_num_threads(args.threads)
    cases = [measure(case, args.runs) for case in args.cases]
    document = {"benchmark": "attention", "machine": machine(), "threads": args.threads, "runs": args.runs, "cases": cases}
    heads = f"{HEADS} query and {KV_HEADS} KV heads of {HEAD_DIM}"
    lines = [f"{counted(args.threads, 'thread')}, {heads}, bf16; ms per layer, kvloom ÷ way"]
    for entry in cases:
        lines.append(entry["case"])
        lines += [
            f"  {name:<18} {way['ms']['median']:9.3f} ({way['ms']['min']:.3f}–{way['ms']['max']:.3f}) ms "
            f"{way['gflop_per_s']:7.1f} GFLOP/s  ÷ {way['kvloom_ratio']:.2f}"
            for name, way in entry["ways"].items()
        ]
    report(args, document, lines)
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
