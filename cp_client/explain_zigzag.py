"""`kvloom explain zigzag`: who computes which tokens of a batch of prefills."""

from argparse import ArgumentParser, Namespace
from typing import Any

from cp_client.shape_args import MAX_RANKS, integer, integers
from cp_layout.errors import LayoutError
from cp_layout.zigzag import BatchRow, partition
from cp_wire.words import counted

MAX_TOKENS = 2**22
"""Tokens of one batch that the command line is willing to list."""


def add_zigzag_arguments(parser: ArgumentParser) -> None:
    """`--pcp`, `--lengths` and `--computed`."""
    parser.add_argument("--pcp", type=integer, required=True, metavar="P", help="members that share the batch")
    parser.add_argument("--lengths", type=integers, required=True, metavar="Q,Q", help="new tokens of each request")
    parser.add_argument("--computed", type=integers, metavar="C,C", help="tokens before them (default: none)")


def zigzag_facts(args: Namespace) -> dict[str, Any]:
    """Rows, positions and attention pairs of every member, and the way back into the order of the batch."""
    computed = [0] * len(args.lengths) if args.computed is None else args.computed
    if len(computed) != len(args.lengths):
        raise LayoutError(f"--computed names {counted(len(computed), 'request')}, --lengths {len(args.lengths)}")
    if args.pcp > MAX_RANKS:
        raise LayoutError(f"{args.pcp} members are more than the limit of {MAX_RANKS}")
    if sum(args.lengths) > MAX_TOKENS:
        raise LayoutError(f"a batch of {sum(args.lengths)} tokens is beyond the limit of {MAX_TOKENS}")
    cut = partition([BatchRow(*row) for row in zip(computed, args.lengths, strict=True)], args.pcp)
    ranks = []
    for member in range(cut.num_members):
        mine = cut.pieces_of(member)
        pieces = (array[mine].tolist() for array in (cut.piece_row, cut.piece_start, cut.piece_length))
        rows = [{"request": row, "start": start, "length": length} for row, start, length in zip(*pieces, strict=True)]
        ranks.append({"rows": rows, "positions": cut.positions[cut.tokens_of(member)].tolist()})
    return {
        "lengths": args.lengths,
        "computed": computed,
        "ranks": ranks,
        "attention_pairs": cut.pairs.tolist(),
        "restore_index": cut.restore.tolist(),
    }
