"""What a prefill→decode transfer sends by whole virtual blocks, whole blocks and tokens: `kvloom bench pd-waste`.

Every combination of prompt length, block size, KV shards and interleave of the prefill side, to one decode shard of the same
block size. All of it is counted: one stream of messages per source shard. What is small enough is moved as well, by gRPC over
loopback with both ends in this process, and timed; the benchmark fails when something else moves than was counted. A transfer
by whole blocks is moved as the range of tokens that it comes to; where it comes to none, because shards that hold nothing of
the last virtual block send nothing of it, it is only counted.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.harness import integers, machine, parser, report, run_benchmark, spread
from benchmarks.pd_waste_move import Traffic, move, target_of
from benchmarks.plot import line_chart
from cp_client.explain_transfer import MAX_TOKENS
from cp_layout.interleave import Layout
from cp_layout.packing import Packing
from cp_layout.reshard import token_runs
from cp_layout.waste import Sent, token_exact, whole_blocks, whole_virtual_blocks
from cp_wire.channels import MAX_MESSAGE_BYTES as CARRIED_BYTES
from cp_wire.flags import integer
from cp_wire.words import counted, percent
from kv_transfer.framing import frame_bytes
from kv_transfer.source import MAX_MESSAGE_BYTES

TOKENS = [1, 4, 16, 64, 100, 256, 1000, 4096, 16384, 65536]
UNITS = ("virtual_block_granular", "block_granular", "token_exact")
BYTES_PER_TOKEN = 23_040
"""K and V of SmolLM2-135M in bf16: 2 · 30 layers · 3 heads · 64 dimensions · 2 bytes."""
PLANES = 60
"""K and V of its layers."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A way to send a prompt. by_shard: tokens that each source shard sends."""

    figure: Sent
    by_shard: list[int]

    def __post_init__(self) -> None:
        assert self.figure.sent == sum(self.by_shard)

    def is_range(self, layout: Layout) -> bool:
        """Whether a prompt of as many tokens as are sent would lie so on the shards."""
        return self.by_shard == layout.local_lens(self.figure.sent)

    def traffic(self, args: Namespace) -> Traffic:
        """What travels, without what gRPC adds."""
        row = args.bytes_per_token // args.planes
        links = [Packing(args.planes, tokens, row, args.message_bytes) for tokens in self.by_shard if tokens]
        sizes = [len(link.rows(message)) * row for link in links for message in range(link.num_messages)]
        return Traffic(sum(sizes), len(sizes), sum(map(frame_bytes, sizes)))


def units_of(layout: Layout, tokens: int) -> dict[str, Unit]:
    """The three ways, by name."""
    shards, b = range(layout.num_shards), layout.block_size
    virtual = [layout.virtual_blocks(tokens) * b for _ in shards]
    blocks = [layout.blocks_needed(shard, tokens) * b for shard in shards]
    return {
        "virtual_block_granular": Unit(whole_virtual_blocks(layout, 0, tokens), virtual),
        "block_granular": Unit(whole_blocks(layout, 0, tokens), blocks),
        "token_exact": Unit(token_exact(0, tokens), layout.local_lens(tokens)),
    }


def measure(args: Namespace, layout: Layout) -> list[dict[str, Any]]:
    """A row for each prompt length, with the three ways; sizes in bytes, times in ms or None where nothing was moved."""
    rows: list[dict[str, Any]] = []
    counted: dict[int, Traffic] = {}
    moved: list[tuple[dict[str, Any], int]] = []
    for tokens in args.tokens:
        units = units_of(layout, tokens)
        row: dict[str, Any] = {
            "tokens": tokens,
            "block_size": layout.block_size,
            "cp": layout.num_shards,
            "interleave": layout.interleave,
            "runs": sum(map(len, token_runs(layout, target_of(layout), 0, tokens).values())),
        }
        small = max(unit.figure.sent for unit in units.values()) * args.bytes_per_token <= args.move_mib << 20
        for name, unit in units.items():
            sent, traffic = unit.figure.sent, unit.traffic(args)
            row[name] = {"sent_tokens": sent, "waste": round(unit.figure.waste, 6), **traffic._asdict(), "ms": None}
            if small and unit.is_range(layout):
                counted[sent] = traffic
                moved.append((row[name], sent))
        rows.append(row)
    if counted:
        times = uvloop.run(move(args, layout, counted))
        for entry, sent in moved:
            entry["ms"] = spread([1000 * seconds for seconds in times[sent]])
    return rows


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Waste over prompt length for the largest block size, one line per (cp, interleave) and unit that wastes anything."""
    block = max(row["block_size"] for row in rows)
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["block_size"] == block:
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
    line_chart(path, f"Waste of a transfer, blocks of {counted(block, 'token')}", "prompt tokens", "% of what is sent", series)


def lines(rows: Sequence[dict[str, Any]], args: Namespace) -> list[str]:
    """The summary for people."""
    row_bytes = args.bytes_per_token // args.planes
    head = [
        f"{counted(args.bytes_per_token, 'byte')} per token, {counted(args.planes, 'row')} each, "
        f"in messages of at most {counted(args.message_bytes, 'byte')}"
        + (f", but of a row of {row_bytes} at least" if row_bytes > args.message_bytes else ""),
        "by unit: waste, messages, KiB on the wire (serialised FetchResponse messages: payload, header, framing; not the "
        "handshake, HTTP/2 or TCP),",
        f"and ms where it was moved as well as counted, with the same result: median of {args.runs}, both ends in one process",
    ]
    titles = ("virtual blocks", "blocks", "tokens")
    columns = f"{'tokens':>7} {'block':>5} {'cp':>3} {'I':>4} {'runs':>7} " + "".join(f"{title:>32}" for title in titles)
    body = [
        f"{row['tokens']:>7} {row['block_size']:>5} {row['cp']:>3} {row['interleave']:>4} {row['runs']:>7} "
        + "".join(cells(row[unit]) for unit in UNITS)
        for row in rows
    ]
    return [*head, columns, *body]


def cells(entry: dict[str, Any]) -> str:
    """Those of a unit, 32 characters."""
    ms = f"{entry['ms']['median']:.1f}" if entry["ms"] else "–"
    return f"{percent(entry['waste']):>8} {entry['messages']:>5} {entry['wire_bytes'] / 1024:>10.1f} {ms:>6}"


def flags_of() -> ArgumentParser:
    """All flags."""
    flags = parser("pd-waste", "what a transfer sends beyond its tokens", plot="the waste")
    lists = integers(1)
    flags.add_argument("--tokens", type=integers(1, MAX_TOKENS), default=TOKENS, help="prompt lengths, comma-separated")
    flags.add_argument("--block-sizes", type=lists, default=[16, 128], help="tokens per block (default: 16,128)")
    flags.add_argument("--cp", type=lists, default=[1, 2, 4, 8], help="KV shards of the prefill side (default: 1,2,4,8)")
    flags.add_argument(
        "--interleaves", type=lists, help="tokens dealt at once; those that do not divide a block size are left out "
        "(default: 1 and the block size)"
    )  # fmt: skip
    flags.add_argument("--bytes-per-token", type=integer(1), default=BYTES_PER_TOKEN, help=f"(default: {BYTES_PER_TOKEN})")
    planes = f"rows of a token, layers · 2 (default: {PLANES}, or the largest divisor of it that divides the bytes)"
    flags.add_argument("--planes", type=integer(1), help=planes)
    flags.add_argument("--message-bytes", type=integer(1, MAX_MESSAGE_BYTES), default=1 << 20, help="(default: 1048576)")
    flags.add_argument(
        "--move-mib", type=integer(0), default=24, metavar="N",
        help="move, not only count, prompts whose virtual blocks have at most N MiB (default: 24; 0: none)",
    )  # fmt: skip
    flags.add_argument("--runs", type=integer(1), default=3, help="repetitions of what is moved (default: 3)")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = flags_of()
    args = flags.parse_args(argv)
    args.planes = args.planes or gcd(PLANES, args.bytes_per_token)
    if args.bytes_per_token % args.planes:
        flags.error(f"--bytes-per-token {args.bytes_per_token} is not a multiple of --planes {args.planes}")
    least, carried = frame_bytes(args.bytes_per_token // args.planes), CARRIED_BYTES["data"]
    if least > carried:
        flags.error(
            f"--bytes-per-token {args.bytes_per_token} in --planes {args.planes} makes messages of {least} bytes: "
            f"a connection carries {carried}"
        )
    layouts = [
        Layout(cp, interleave, block)
        for block in args.block_sizes
        for cp in args.cp
        for interleave in (args.interleaves or sorted({1, block}) if cp > 1 else [block])
        if block % interleave == 0
    ]
    if not layouts:
        said = (",".join(map(str, numbers)) for numbers in (args.interleaves, args.block_sizes))
        flags.error("no number of --interleaves {} divides one of --block-sizes {}".format(*said))
    rows = [row for layout in layouts for row in measure(args, layout)]
    document = {"benchmark": "pd-waste", "machine": machine(), "rows": rows}
    report(args, document, lines(rows, args), lambda path: plot(rows, path))
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
