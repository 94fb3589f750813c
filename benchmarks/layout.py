"""How much KV N shards hold together, by simulation: `kvloom bench layout`.

Requests are placed, each with the roomiest shard offset, until one no longer fits. Capacity = tokens placed, as a multiple of
what one shard with the same blocks holds of the same requests.
"""

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, parser, report, run_benchmark, spread
from benchmarks.plot import line_chart
from cp_layout.capacity import blocks_by_member, roomiest_offset
from cp_layout.interleave import Layout
from cp_wire.flags import integer
from cp_wire.words import counted

BLOCKS = 1024


def placed_tokens(layout: Layout, blocks: int, next_length: Callable[[], int]) -> int:
    """Tokens of the requests that fit into N pools of `blocks` blocks each."""
    free = [blocks] * layout.num_shards
    total = 0
    while True:
        length = next_length()
        needed = blocks_by_member(layout, length, roomiest_offset(layout, length, free))
        if any(need > room for need, room in zip(needed, free, strict=True)):
            return total
        free = [room - need for room, need in zip(free, needed, strict=True)]
        total += length


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Capacity per shard over the number of shards, a line per interleave."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        series.setdefault(f"interleave {row['interleave']}", []).append((row["shards"], row["per_shard"]["median"]))
    line_chart(path, "KV that N shards hold together", "N", "÷ N × one shard's", series)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser("layout", "KV capacity of N shards", plot="the capacity by N")
    flags.add_argument("--block-size", type=integer(1), default=16, help="tokens per block (default: 16)")
    flags.add_argument("--seeds", type=integer(1), default=20, help="repetitions (default: 20)")
    args = flags.parse_args(argv)
    size = args.block_size
    rows = []
    for shards in (2, 4, 8):
        for interleave in (1, size):
            layout, single = Layout(shards, interleave, size), Layout(1, size, size)
            ratios = []
            for seed in range(args.seeds):
                draws = [random.Random(seed) for _ in range(2)]
                ratios.append(
                    placed_tokens(layout, BLOCKS, lambda rng=draws[0]: rng.randint(1, 12 * size))
                    / placed_tokens(single, BLOCKS, lambda rng=draws[1]: rng.randint(1, 12 * size))
                    / shards
                )
            rows.append({"shards": shards, "interleave": interleave, "lengths": f"1–{12 * size}", "per_shard": spread(ratios)})
    document = {"benchmark": "layout", "machine": machine(), "block_size": size, "blocks_per_shard": BLOCKS, "rows": rows}
    lines = [f"block size {size}, {BLOCKS} blocks per shard, {counted(args.seeds, 'seed')}: capacity ÷ (N × one shard's)"]
    lines += [
        f"N {row['shards']} interleave {row['interleave']:>3}: {row['per_shard']['median']:.3f} "
        f"({row['per_shard']['min']:.3f}–{row['per_shard']['max']:.3f})"
        for row in rows
    ]
    report(args, document, lines, lambda path: plot(rows, path))
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
