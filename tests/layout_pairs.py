"""Pairs of sides between which the KV of a request moves: what products of layouts, grids and heads are drawn from."""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.laws import legal_shapes
from cp_layout.reshard import Side

T = TypeVar("T")

QUERY_HEADS = 12
"""A multiple of every number of KV heads and of every TP size here."""


def layouts() -> list[Layout]:
    """Every (N, I, B) from {1, 2, 4} × {1, 2, B} × {4, 16}; with one shard the interleave says nothing, and is B."""
    return [Layout(n, i, b) for n in (1, 2, 4) for b in (4, 16) for i in ((1, 2, b) if n > 1 else (b,))]


def lengths(*sizes: int) -> list[int]:
    """1, and around each size: one less, the size, one more."""
    return sorted({1} | {size + delta for size in sizes for delta in (-1, 0, 1) if size + delta > 0})


def grids(num_shards: int, kv_heads: int | None) -> list[Grid]:
    """Every legal grid with so many shards: across replicas, inside TP groups, across both. None: a latent head."""
    tps = (1, 3) if kv_heads == 3 else (1, 2, 4)
    legal = legal_shapes(16, QUERY_HEADS, kv_heads or 1, mla=kv_heads is None)
    return [Grid(*each) for each in legal if each[0] in tps and each[1] in (1, 2, 4) and each[2] == num_shards]


def on_grids(pairs: Iterable[tuple[Layout, Layout]], kv_heads: int | None, seed: object) -> list[tuple[Side, Side]]:
    """The layouts as sides, each on a grid that makes it and with a shard offset.

    Grids take turns, on either end: of those with the same number of shards, none comes twice before all others have come.
    """
    chooser = random.Random(str(seed))
    turns = [{n: _dealt(grids(n, kv_heads), chooser) for n in (1, 2, 4)} for _ in range(2)]
    return [
        (
            Side(next(turns[0][source.num_shards]), source, kv_heads, chooser.randrange(source.num_shards)),
            Side(next(turns[1][target.num_shards]), target, kv_heads, chooser.randrange(target.num_shards)),
        )
        for source, target in pairs
    ]


def _dealt(cards: Sequence[T], chooser: random.Random) -> Iterator[T]:
    while True:
        yield from chooser.sample(cards, len(cards))
