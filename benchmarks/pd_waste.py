"""What a prefill→decode transfer sends by whole virtual blocks, whole blocks and tokens: `kvloom bench pd-waste`.

Counted, not timed: every combination of prompt length, block size, KV shards and interleave of the prefill side, to one
decode shard of the same block size. Messages are those of one stream per source shard, at most `--message-bytes` each.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import integers, machine, parser, report, run_benchmark
from benchmarks.plot import line_chart
from cp_layout.interleave import Layout
from cp_layout.reshard import token_runs
from cp_layout.waste import Sent, token_exact, whole_blocks, whole_virtual_blocks
from cp_wire.flags import integer

TOKENS = [1, 4, 16, 64, 100, 256, 1000, 4096, 16384, 65536]
UNITS = ("virtual_block_granular", "block_granular", "token_exact")
BYTES_PER_TOKEN = 23_040
"""K and V of SmolLM2-135M in bf16: 2 · 30 layers · 3 heads · 64 dimensions · 2 bytes."""


def measure(layout: Layout, tokens: int, bytes_per_token: int, message_bytes: int) -> dict[str, Any]:
    """The three units of transfer for one prompt; sizes in bytes."""
    target = Layout(1, layout.block_size, layout.block_size)
    runs = token_runs(layout, target, 0, tokens)
    n, b = layout.num_shards, layout.block_size
    # Tokens that each source shard sends, by unit.
    units: dict[str, tuple[Sent, list[int]]] = {
        "virtual_block_granular": (whole_virtual_blocks(layout, 0, tokens), [layout.virtual_blocks(tokens) * b] * n),
        "block_granular": (whole_blocks(layout, 0, tokens), [layout.blocks_needed(shard, tokens) * b for shard in range(n)]),
        "token_exact": (token_exact(0, tokens), [part.tokens for part in runs.values()]),
    }
    row: dict[str, Any] = {
        "tokens": tokens,
        "block_size": b,
        "cp": n,
        "interleave": layout.interleave,
        "runs": sum(map(len, runs.values())),
    }
    for name, (figure, by_shard) in units.items():
        assert figure.sent == sum(by_shard)
        row[name] = {
            "sent_tokens": figure.sent,
            "waste": round(figure.waste, 6),
            "bytes": figure.sent * bytes_per_token,
            "messages": sum(-(-sent * bytes_per_token // message_bytes) for sent in by_shard),
        }
    return row


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Waste over prompt length for the largest block size, one line per (cp, interleave) and unit that wastes anything."""
    block = max(row["block_size"] for row in rows)
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["block_size"] == block and row["cp"] > 1:
            for unit in UNITS[1:]:
                if unit == "token_exact":
                    name = "tokens, any layout"
                elif row["interleave"] == block:
                    # Blocks of the sequence, whoever has them.
                    name = "blocks, I = B, any cp"
                else:
                    name = f"blocks, I {row['interleave']}, cp {row['cp']}"
                series.setdefault(name, []).append((row["tokens"], 100 * row[unit]["waste"]))
    series = {name: sorted(set(points)) for name, points in series.items()}
    line_chart(path, f"Waste of a transfer, blocks of {block} tokens", "prompt tokens", "% of what is sent", series)


def lines(rows: Sequence[dict[str, Any]], args: Namespace) -> list[str]:
    """The summary for people."""
    head = f"{args.bytes_per_token} bytes per token, messages of {args.message_bytes} bytes; waste and messages by unit"
    columns = f"{'tokens':>7} {'block':>5} {'cp':>3} {'I':>4} {'runs':>7}   virtual blocks        blocks        tokens"
    body = [
        f"{row['tokens']:>7} {row['block_size']:>5} {row['cp']:>3} {row['interleave']:>4} {row['runs']:>7}  "
        + " ".join(f"{row[unit]['waste']:>7.1%} {row[unit]['messages']:>5}" for unit in UNITS)
        for row in rows
    ]
    return [head, columns, *body]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser("pd-waste", "what a transfer sends beyond its tokens", plot="the waste")
    lists = integers(1)
    flags.add_argument("--tokens", type=lists, default=TOKENS, help="prompt lengths, comma-separated")
    flags.add_argument("--block-sizes", type=lists, default=[16, 128], help="tokens per block (default: 16,128)")
    flags.add_argument("--cp", type=lists, default=[1, 2, 4, 8], help="KV shards of the prefill side (default: 1,2,4,8)")
    flags.add_argument(
        "--interleaves", type=lists, help="tokens dealt at once; those that do not divide a block size are left out "
        "(default: 1 and the block size)"
    )  # fmt: skip
    flags.add_argument("--bytes-per-token", type=integer(1), default=BYTES_PER_TOKEN, help=f"(default: {BYTES_PER_TOKEN})")
    flags.add_argument("--message-bytes", type=integer(1), default=1 << 20, help="(default: 1048576)")
    args = flags.parse_args(argv)
    rows = [
        measure(Layout(cp, interleave, block), tokens, args.bytes_per_token, args.message_bytes)
        for block in args.block_sizes
        for cp in args.cp
        for interleave in (args.interleaves or sorted({1, block}) if cp > 1 else [block])
        if block % interleave == 0
        for tokens in args.tokens
    ]
    if args.plot is not None:
        plot(rows, args.plot)
    report(args, {"benchmark": "pd-waste", "machine": machine(), "rows": rows}, lines(rows, args))
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
