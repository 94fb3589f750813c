"""Command-line arguments that describe shapes: sizes of the rank grid, the layout, and lists of integers."""

import argparse
from argparse import ArgumentParser, Namespace

from cp_layout.errors import LayoutError
from cp_layout.grid import Grid
from cp_layout.interleave import Layout

MAX_RANKS = 65_536
"""Ranks, and KV shards, that the command line is willing to draw or judge."""
MAX_INTEGER = 2**40
"""Largest token count, position, block id and size; slots then fit 64 bits for every block size in use."""


def integer(text: str) -> int:
    """An integer whose size is bounded on both sides; what it means is judged by the laws."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if abs(value) > MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"{text} is beyond the limit of {MAX_INTEGER}")
    return value


def integers(text: str) -> list[int]:
    """A comma-separated list of integers that are at least 0, such as block ids or positions."""
    values = [integer(part) for part in text.split(",")]
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"{min(values)} is negative")
    return values


def add_grid_arguments(parser: ArgumentParser) -> None:
    """`--tp`, `--pcp`, `--dcp`, `--dp` with their short and long spellings; every size is 1 by default."""
    for short, name, meaning in (
        ("tp", "tensor-parallel-size", "ranks that together hold one copy of the weights"),
        ("pcp", "prefill-context-parallel-size", "replicas that share a prompt"),
        ("dcp", "decode-context-parallel-size", "KV shards; reuses the ranks of PCP and TP"),
        ("dp", "data-parallel-size", "independent sets of replicas"),
    ):
        parser.add_argument(
            f"--{short}",
            f"-{short}",
            f"--{name}",
            dest=short,
            type=integer,
            default=1,
            metavar="N",
            help=f"{meaning} (default: 1)",
        )


def add_layout_arguments(parser: ArgumentParser) -> None:
    """`--block-size` (16) and `--interleave` alias `--cp-kv-cache-interleave-size` (the block size)."""
    parser.add_argument("--block-size", type=integer, default=16, metavar="B", help="token slots of one block (default: 16)")
    parser.add_argument(
        "--interleave",
        "--cp-kv-cache-interleave-size",
        type=integer,
        metavar="I",
        help="consecutive tokens on one shard (default: the block size)",
    )


def grid_from(args: Namespace) -> Grid:
    """The grid that `add_grid_arguments` described; `LayoutError` names the law it breaks."""
    grid = Grid(tp=args.tp, pcp=args.pcp, dcp=args.dcp, dp=args.dp)
    if grid.world_size > MAX_RANKS:
        raise LayoutError(f"{grid.world_size} ranks (dp·pcp·tp) are more than the limit of {MAX_RANKS}")
    return grid


def layout_from(args: Namespace, num_shards: int) -> Layout:
    """The layout that `add_layout_arguments` described, over so many shards; `LayoutError` names the law it breaks."""
    if num_shards > MAX_RANKS:
        raise LayoutError(f"{num_shards} KV shards are more than the limit of {MAX_RANKS}")
    interleave = args.block_size if args.interleave is None else args.interleave
    return Layout(num_shards, interleave, args.block_size)
