"""`kvloom check`: judge a configuration by the laws of the layout, without starting anything."""

import sys
from argparse import ArgumentParser, Namespace, _SubParsersAction

from cp_client.exit_status import DONE, REFUSED
from cp_client.shape_args import add_grid_arguments, add_layout_arguments, grid_from, integer, layout_from
from cp_layout.errors import LayoutError
from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.laws import check_heads, check_layout
from cp_wire.side_flags import MIXED, add_side_flags, naming, sides_of
from cp_wire.words import counted


def add_check_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    """Add `check [MODEL] --tp --pcp --dcp …`; sets `func(args) -> exit status`."""
    parser = subparsers.add_parser("check", help="judge a configuration before anything starts")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="Hugging Face directory or GGUF file whose heads are judged")
    add_grid_arguments(parser)
    add_layout_arguments(parser)
    add_side_flags(parser)
    parser.add_argument("--num-attention-heads", type=integer, metavar="H", help="Q heads, when no MODEL is given")
    kv_heads = parser.add_mutually_exclusive_group()
    kv_heads.add_argument("--num-key-value-heads", type=integer, metavar="K", help="KV heads, when no MODEL is given")
    kv_heads.add_argument("--mla", action="store_true", help="latent attention: one latent head instead of KV heads")
    parser.set_defaults(func=check)


def check(args: Namespace) -> int:
    """Exit status 0 and a line of effective sizes per side, or 2 and the broken law on stderr."""
    try:
        judged = _heads(args)
        lines = [_judged(side, role, judged) for role, side in sides_of(args).items()]
    except (LayoutError, _Refused) as refusal:
        print(f"kvloom: {refusal}", file=sys.stderr)
        return REFUSED
    print("\n".join(lines))
    return DONE


def _judged(args: Namespace, role: str, judged: "tuple[tuple[int, int], bool] | None") -> str:
    """What is to be said of a legal side; `LayoutError` names the law that it breaks."""
    heads, mla = (None, args.mla) if judged is None else judged
    with naming(role):
        grid = grid_from(args)
        layout = layout_from(args, grid.dcp)
        check_layout(grid, layout, kv_tokens_per_rank=getattr(args, "kv_cache_tokens_per_rank", None))
        if heads is not None:
            check_heads(grid, *heads, mla=mla)
    summary = _summary(grid, layout, heads, mla)
    return f"ok: {summary}" if role == MIXED else f"ok: {role}: {summary}"


class _Refused(Exception):
    """Arguments that contradict one another, or a model that cannot be read."""


def _heads(args: Namespace) -> tuple[tuple[int, int], bool] | None:
    """((Q heads, KV heads), whether they are latent) of the model or of the arguments; None when only the shape is judged."""
    queries, keys = args.num_attention_heads, args.num_key_value_heads
    if args.model is not None:
        if args.mla or queries is not None or keys is not None:
            raise _Refused(f"MODEL {args.model} brings its own heads: give either MODEL or head counts (or --mla), not both")
        return _model_heads(args.model)
    if args.mla:
        return None if queries is None else ((queries, 1), True)
    if (queries is None) != (keys is None):
        raise _Refused("--num-attention-heads and --num-key-value-heads are judged together: give both or neither")
    return None if queries is None else ((queries, keys), False)


def _model_heads(path: str) -> tuple[tuple[int, int], bool]:
    from model_files import ModelRefused, open_model

    try:
        shape = open_model(path).shape
    except ModelRefused as error:
        raise _Refused(str(error)) from None
    return (shape.num_heads, shape.num_kv_heads), shape.mla is not None


def _summary(grid: Grid, layout: Layout, heads: tuple[int, int] | None, mla: bool) -> str:
    judged = "heads not judged"
    if mla:
        judged = "latent attention" if heads is None else f"{heads[0]} Q heads, latent attention"
    elif heads is not None:
        judged = f"{heads[0]} Q heads, {heads[1]} KV heads"
    return (
        f"{counted(grid.world_size, 'rank')} (dp {grid.dp}, pcp {grid.pcp}, tp {grid.tp}), "
        f"dcp {grid.dcp} with d {grid.dcp_in_tp}, block size {layout.block_size}, interleave {layout.interleave}, "
        f"virtual block {layout.virtual_block_size}, {judged}"
    )
