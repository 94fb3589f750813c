"""`kvloom explain transfer`: what moves when a request's KV goes from one layout to another."""

import argparse
from argparse import ArgumentParser, Namespace
from typing import Any

from cp_client.shape_args import MAX_RANKS, integer
from cp_layout.errors import LayoutError
from cp_layout.interleave import Layout
from cp_layout.reshard import token_runs
from cp_layout.waste import Sent, whole_blocks, whole_virtual_blocks

MAX_TOKENS = 1 << 22
"""Tokens whose moves the command line is willing to list: with interleave 1 there may be one move per token."""

_FIELDS = {"cp": "num_shards", "interleave": "interleave", "block": "block_size"}


def layout_text(text: str) -> dict[str, int]:
    """`cp=4,interleave=1,block=16` as numbers; any of them may be absent, none may come twice."""
    values: dict[str, int] = {}
    for part in text.split(","):
        name, found, value = part.partition("=")
        if not found or name not in _FIELDS:
            raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(f'{field}=NUMBER' for field in _FIELDS)}")
        if name in values:
            raise argparse.ArgumentTypeError(f"{name} is given twice")
        values[name] = integer(value)
    return values


def add_transfer_arguments(parser: ArgumentParser) -> None:
    """`--tokens`, `--from`, `--to`."""
    parser.add_argument("--tokens", type=integer, required=True, metavar="L", help="length of the request")
    for flag, name, which in (("--from", "source", "prefill"), ("--to", "target", "decode")):
        parser.add_argument(
            flag,
            dest=name,
            type=layout_text,
            required=True,
            metavar="cp=N,interleave=I,block=B",
            help=f"layout of the {which} side (default of what is absent: cp=1, block=16, interleave = block)",
        )


def transfer_facts(args: Namespace) -> dict[str, Any]:
    """Moves of [0, tokens) by source shard, target shard and token, and what coarser units would have sent."""
    source, target = _layout("--from", args.source), _layout("--to", args.target)
    if args.tokens > MAX_TOKENS:
        raise LayoutError(f"{args.tokens} tokens are more than the limit of {MAX_TOKENS}")
    moves = [
        dict(zip(("src", "src_block", "src_offset", "dst", "dst_block", "dst_offset", "count"), move, strict=True))
        for (src, dst), runs in sorted(token_runs(source, target, 0, args.tokens).items())
        for move in zip(
            [src] * len(runs),
            runs.src_column.tolist(),
            runs.src_offset.tolist(),
            [dst] * len(runs),
            runs.dst_column.tolist(),
            runs.dst_offset.tolist(),
            runs.count.tolist(),
            strict=True,
        )
    ]
    exact = Sent(args.tokens, sum(move["count"] for move in moves))
    return {
        "from": _named(source),
        "to": _named(target),
        "moves": moves,
        "useful_tokens": exact.useful,
        **_sent(exact),
        "block_granular": _sent(whole_blocks(source, 0, args.tokens)),
        "virtual_block_granular": _sent(whole_virtual_blocks(source, 0, args.tokens)),
    }


def _layout(flag: str, values: dict[str, int]) -> Layout:
    shards, block = values.get("cp", 1), values.get("block", 16)
    if shards > MAX_RANKS:
        raise LayoutError(f"{shards} KV shards are more than the limit of {MAX_RANKS}")
    try:
        return Layout(shards, values.get("interleave", block), block)
    except LayoutError as refusal:
        raise LayoutError(f"{flag}: {refusal}") from None


def _named(layout: Layout) -> dict[str, int]:
    return {name: getattr(layout, field) for name, field in _FIELDS.items()}


def _sent(figure: Sent) -> dict[str, float]:
    return {"sent_tokens": figure.sent, "waste": figure.waste}
