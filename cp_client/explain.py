"""`kvloom explain`: the arithmetic of the layout, drawn or as JSON, without a cluster.

Imports neither torch nor grpc, and rich only when it draws, so that it answers at once.
"""

import json
import sys
from argparse import ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cp_client.exit_status import DONE, FAILED, REFUSED
from cp_client.explain_transfer import add_transfer_arguments, transfer_facts
from cp_client.explain_zigzag import add_zigzag_arguments, zigzag_facts
from cp_client.shape_args import (
    add_grid_arguments,
    add_layout_arguments,
    grid_from,
    integer,
    integers,
    layout_from,
)
from cp_layout.capacity import blocks_by_member
from cp_layout.errors import LayoutError

Facts = dict[str, Any]


def add_explain_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    """Add `explain slots|lengths|groups|zigzag|transfer`; every one sets `func(args) -> exit status`."""
    explain = subparsers.add_parser("explain", help="show where tokens, blocks and ranks lie")
    topics = explain.add_subparsers(dest="topic", required=True, metavar="{slots,lengths,groups,zigzag,transfer}")

    slots = _topic(topics, "slots", "owner and slot of token positions", slot_facts)
    _add_shards(slots)
    slots.add_argument(
        "--block-table", type=integers, required=True, metavar="ID,ID", help="block ids, the same on every shard"
    )
    slots.add_argument("--positions", type=integers, required=True, metavar="P,P", help="token positions")

    lengths = _topic(topics, "lengths", "tokens and blocks that each shard holds of a request", length_facts)
    _add_shards(lengths)
    lengths.add_argument("--tokens", type=integer, required=True, metavar="L", help="length of the request")

    groups = _topic(topics, "groups", "the rank grid and its TP, PCP and DCP groups", group_facts)
    add_grid_arguments(groups)

    zigzag = _topic(topics, "zigzag", "which prefill member computes which tokens of a batch", zigzag_facts)
    add_zigzag_arguments(zigzag)

    transfer = _topic(topics, "transfer", "what moves between two layouts, and what coarser units would send", transfer_facts)
    add_transfer_arguments(transfer)


def slot_facts(args: Namespace) -> Facts:
    """Owner of each position and its slot on every shard, −1 where the shard does not own it."""
    layout = layout_from(args, args.cp)
    table = np.array(args.block_table, dtype=np.int64)
    positions = np.array(args.positions, dtype=np.int64)
    return {
        "cp": layout.num_shards,
        "interleave": layout.interleave,
        "block_size": layout.block_size,
        "virtual_block_size": layout.virtual_block_size,
        "positions": args.positions,
        "owner": [layout.owner(position) for position in args.positions],
        "slots": [layout.slots(shard, table, positions).tolist() for shard in range(layout.num_shards)],
    }


def length_facts(args: Namespace) -> Facts:
    """Tokens and really needed blocks of a request of `tokens` tokens on every shard."""
    layout = layout_from(args, args.cp)
    return {
        "cp": layout.num_shards,
        "interleave": layout.interleave,
        "block_size": layout.block_size,
        "tokens": args.tokens,
        "local_lens": layout.local_lens(args.tokens),
        "blocks": blocks_by_member(layout, args.tokens, 0),
        "virtual_blocks": layout.virtual_blocks(args.tokens),
    }


def group_facts(args: Namespace) -> Facts:
    """World size and the groups, as lists of global ranks in group order; no law on heads is judged."""
    grid = grid_from(args)
    return {
        "world_size": grid.world_size,
        "tp": grid.tp_groups(),
        "pcp": grid.pcp_groups(),
        "dcp": grid.dcp_groups(),
    }


def _add_shards(parser: ArgumentParser) -> None:
    parser.add_argument("--cp", type=integer, default=1, metavar="N", help="KV shards (default: 1)")
    add_layout_arguments(parser)


def _topic(
    topics: "_SubParsersAction[ArgumentParser]", name: str, summary: str, facts: Callable[[Namespace], Facts]
) -> ArgumentParser:
    parser = topics.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write the table as a picture")
    parser.set_defaults(func=lambda args: _answer(args, name, facts))
    return parser


def _answer(args: Namespace, topic: str, facts_of: Callable[[Namespace], Facts]) -> int:
    if args.svg is not None and not args.svg.parent.is_dir():
        print(f"kvloom: --svg is {args.svg}: {args.svg.parent} is not a directory", file=sys.stderr)
        return REFUSED
    try:
        facts = facts_of(args)
    except LayoutError as refusal:
        print(f"kvloom: {refusal}", file=sys.stderr)
        return REFUSED
    if args.json:
        print(json.dumps(facts))
    if args.json and args.svg is None:
        return DONE
    from cp_client.drawing import print_table, write_svg
    from cp_client.explain_tables import TABLES

    table = TABLES[topic](facts)
    if not args.json:
        print_table(table)
    if args.svg is not None:
        try:
            write_svg(table, args.svg)
        except OSError as failure:
            print(f"kvloom: cannot write {args.svg}: {failure.strerror}", file=sys.stderr)
            return FAILED
    return DONE
