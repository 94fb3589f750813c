"""Flags of a cluster whose prompts are computed on other ranks than their outputs.

Sizes and layout flags exist for each side too, as `--prefill.FLAG` and `--decode.FLAG`; without a prefix they hold for both.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod

from cp_layout.errors import LayoutError
from cp_wire.numbers import integer
from cp_wire.words import counted

ROLES = ("prefill", "decode")
MIXED = "mixed"
"""The one role of a cluster without sides."""

FAILURE_POLICIES = ("recompute", "fail")
"""What becomes of a request whose KV can't be moved."""

SIZES = ("tp", "pcp", "dcp", "dp")
SIDE_FLAGS: Mapping[str, tuple[str, Callable[[str], int]]] = {
    **{size: (size, integer(1)) for size in SIZES},
    "block-size": ("block_size", integer(1)),
    "cp-kv-cache-interleave-size": ("interleave", integer(1)),
    "kv-cache-tokens-per-rank": ("kv_cache_tokens_per_rank", integer(1, 2**64 - 1)),
    "max-num-batched-tokens": ("max_num_batched_tokens", integer(1)),
}
"""FLAG → (where the flag without a prefix is found, what it takes)."""


def add_side_flags(parser: ArgumentParser) -> None:
    """`--prefill-ranks`, `--decode-ranks`, `--kv-load-failure-policy`, and `SIDE_FLAGS` with either prefix; absent = None."""
    group = parser.add_argument_group(
        "prefill and decode on different ranks",
        "Give both numbers of ranks; --prefill.FLAG and --decode.FLAG set one side, FLAG alone sets both.",
    )
    for role in ROLES:
        group.add_argument(
            f"--{role}-ranks", dest=f"{role}_ranks", type=integer(1), metavar="N", help=f"ranks of the {role} side"
        )
    group.add_argument(
        "--kv-load-failure-policy",
        choices=FAILURE_POLICIES,
        default=FAILURE_POLICIES[0],
        help="when KV can't be moved: recompute it on the decode side, or fail the request (default: recompute)",
    )
    for role in ROLES:
        for flag, (dest, parse) in SIDE_FLAGS.items():
            group.add_argument(
                f"--{role}.{flag}", dest=f"{role}_{dest}", type=parse, metavar="N", help=f"--{flag} of the {role} side"
            )


def has_sides(args: Namespace) -> bool:
    """Whether both numbers of ranks are given; `LayoutError` for half of what makes a side."""
    prefill, decode = args.prefill_ranks, args.decode_ranks
    if (prefill is None) != (decode is None):
        given, missing = ("prefill", "decode") if decode is None else ("decode", "prefill")
        raise LayoutError(f"--{given}-ranks {prefill or decode} without --{missing}-ranks: both sides need ranks")
    if prefill is not None:
        return True
    for role in ROLES:
        for flag, (dest, _) in SIDE_FLAGS.items():
            value = getattr(args, f"{role}_{dest}")
            if value is not None:
                raise LayoutError(f"--{role}.{flag} {value} is for a side of its own: give --prefill-ranks and --decode-ranks")
    if args.kv_load_failure_policy != FAILURE_POLICIES[0]:
        policy = f"--kv-load-failure-policy {args.kv_load_failure_policy}"
        raise LayoutError(f"{policy} without --prefill-ranks and --decode-ranks: no KV is moved, so none can fail to be")
    return False


def sides_of(args: Namespace) -> dict[str, Namespace]:
    """The arguments as each side has them, by role; those of a cluster without sides under `MIXED`.

    `LayoutError` when a side's sizes need another number of ranks than it has.
    """
    if not has_sides(args):
        return {MIXED: args}
    return {role: _side(args, role) for role in ROLES}


@contextmanager
def naming(role: str) -> Iterator[None]:
    """A law that is broken inside is said to be broken by the side."""
    try:
        yield
    except LayoutError as refusal:
        if role == MIXED:
            raise
        raise LayoutError(f"{role} side: {refusal}") from refusal


def _side(args: Namespace, role: str) -> Namespace:
    own = Namespace(**vars(args))
    for dest, _ in SIDE_FLAGS.values():
        value = getattr(args, f"{role}_{dest}")
        if value is not None:
            setattr(own, dest, value)
    ranks, sizes = getattr(args, f"{role}_ranks"), {size: getattr(own, size) for size in ("dp", "pcp", "tp")}
    if prod(sizes.values()) != ranks:
        words = ", ".join(f"{size} {value}" for size, value in sizes.items())
        raise LayoutError(
            f"the {role} side has {counted(ranks, 'rank')} (--{role}-ranks), "
            f"its shape needs dp·pcp·tp = {prod(sizes.values())} ({words})"
        )
    return own
