"""Which tokens of a request move where, when its KV goes from one layout to another.

Two levels, because tokens and heads are cut independently of one another:

- *Runs* say how the tokens of one source shard lie on one target shard: maximal stretches that are contiguous inside one
  block on both sides. They depend on the two layouts and the token range alone.
- *Links* say which source rank serves which target rank: a target rank needs all tokens of its shard and all its KV heads,
  and each source rank has one shard and some of the heads. All runs of a shard pair, for the heads of the link, are one
  stream of bytes between its two ranks.

Ranks are counted inside one DP index of a side: 0 … pcp·tp − 1. Shard offsets decide on which member, hence on which ranks, a
shard lies; they move no token between shards.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cp_layout.cuts import kv_head_cut
from cp_layout.errors import LayoutError
from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.laws import check_heads, check_layout

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a transfer: who holds which part of a request's KV.

    kv_heads: KV heads of the whole model, or None for one latent head that all TP ranks share (MLA). shard_offset: of this
    request on this side. Raises `LayoutError` when grid, layout and heads break a law, or the grid has more than one DP index.
    """

    grid: Grid
    layout: Layout
    kv_heads: int | None
    shard_offset: int = 0

    def __post_init__(self) -> None:
        if self.grid.dp != 1:
            raise LayoutError(f"a side of a transfer is one DP index, the grid has {self.grid.dp}")
        if not 0 <= self.shard_offset < self.layout.num_shards:
            raise LayoutError(f"shard offset {self.shard_offset} does not exist with {self.layout.num_shards} KV shards")
        check_layout(self.grid, self.layout)
        heads = self.heads
        check_heads(self.grid, heads * self.grid.tp, heads, mla=self.kv_heads is None)

    @property
    def heads(self) -> int:
        """KV heads that a token has on this side, all ranks together: 1 for a latent head."""
        return 1 if self.kv_heads is None else self.kv_heads

    def shard_of(self, rank: int) -> int:
        """Shard that the rank holds of the request."""
        return self.layout.shard_on(self.grid.dcp_member(rank), self.shard_offset)

    def heads_of(self, rank: int) -> range:
        """KV heads that the rank holds."""
        if self.kv_heads is None:
            return range(1)
        return range(*kv_head_cut(self.kv_heads, self.grid.tp, self.grid.coords(rank).tp))

    @property
    def copies(self) -> int:
        """How many ranks hold the same token of the same head: TP ranks that share a head but no DCP group, and every
        replica when dcp = 1 (that is so for a prompt; a token whose KV one replica alone wrote has fewer)."""
        return self.grid.world_size * len(self.heads_of(0)) // (self.layout.num_shards * self.heads)

    def holders(self, shard: int, head: int) -> list[int]:
        """Ranks that hold the head's KV of the shard, ascending: its copies, in their order."""
        ranks = range(self.grid.world_size)
        return [rank for rank in ranks if self.shard_of(rank) == shard and head in self.heads_of(rank)]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Stretches of tokens of one (source shard, target shard) pair: parallel arrays [R], in token order.

    A run is contiguous inside one block on both sides. `columns` are columns of the shard's block table, offsets tokens
    inside the block.
    """

    src_column: Int64s
    src_offset: Int64s
    dst_column: Int64s
    dst_offset: Int64s
    count: Int64s

    def __len__(self) -> int:
        return len(self.count)

    @property
    def tokens(self) -> int:
        """Tokens of all runs."""
        return int(self.count.sum())

    @property
    def src_columns(self) -> range:
        """Columns of the source shard's block table from the first to the last that the runs touch."""
        return range(int(self.src_column.min()), int(self.src_column.max()) + 1)

    def src_slots(self, block_table: Int64s, block_size: int, first_column: int = 0) -> Int64s:
        """[tokens] slots (block_id·B + offset) of the tokens on the source, in run order.

        block_table: block ids of the source shard on the source rank, from column `first_column` on; `LayoutError` when
        it lacks columns.
        """
        return _slots(block_table, block_size, self.src_column - first_column, self.src_offset, self.count)

    def dst_slots(self, block_table: Int64s, block_size: int, first_column: int = 0) -> Int64s:
        """[tokens] slots of the same tokens, in the same order, on the target."""
        return _slots(block_table, block_size, self.dst_column - first_column, self.dst_offset, self.count)


@dataclass(frozen=True, slots=True)
class Link:
    """All KV that target rank `dst` takes from source rank `src`: the runs of its shard pair, for some heads.

    src_head and dst_head count from the first head that the rank holds.
    """

    src: int
    dst: int
    src_shard: int
    dst_shard: int
    src_head: int
    dst_head: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class Reshard:
    """A planned transfer: the runs of every shard pair that has any, and the links over which they travel, by (dst, src)."""

    runs: Mapping[tuple[int, int], Runs]
    links: tuple[Link, ...]

    def runs_of(self, link: Link) -> Runs:
        """The runs that travel over the link."""
        return self.runs[link.src_shard, link.dst_shard]

    @property
    def head_tokens(self) -> int:
        """(head, token) pairs that move, those of every copy that the target keeps included."""
        return sum(self.runs_of(link).tokens * link.num_heads for link in self.links)


def reshard(source: Side, target: Side, start: int, end: int) -> Reshard:
    """The transfer of tokens [start, end) between two sides.

    Every rank of the target gets every token of its shard, for every head it holds, exactly once. Where the source keeps
    copies, target rank i reads copy i mod copies, so that they share the work. `LayoutError` for a range that is none, or
    for sides of models with different KV heads.
    """
    if source.kv_heads != target.kv_heads:
        raise LayoutError(f"the source has {_named(source)}, the target {_named(target)}: they are not the same model")
    runs = token_runs(source.layout, target.layout, start, end)
    holders = {
        (shard, head): source.holders(shard, head) for shard in sorted({src for src, _ in runs}) for head in range(source.heads)
    }
    links: list[Link] = []
    for rank in range(target.grid.world_size):
        shard, heads = target.shard_of(rank), target.heads_of(rank)
        by_source: dict[int, list[int]] = {}
        for src_shard, dst_shard in runs:
            if dst_shard == shard:
                for head in heads:
                    copies = holders[src_shard, head]
                    by_source.setdefault(copies[rank % len(copies)], []).append(head)
        for src, moved in sorted(by_source.items()):
            # Both sides hold neighbouring heads, so what they have in common is neighbouring too.
            first = source.heads_of(src).start
            links.append(Link(src, rank, source.shard_of(src), shard, moved[0] - first, moved[0] - heads.start, len(moved)))
    return Reshard(runs, tuple(links))


def token_runs(source: Layout, target: Layout, start: int, end: int) -> dict[tuple[int, int], Runs]:
    """Runs of tokens [start, end) by (source shard, target shard), pairs without a token left out.

    Cost: O(atoms), an atom being what neither side's interleave cuts; at most one per token. Atoms that are neighbours on
    both shards and lie in one block on both are one run.
    """
    if not 0 <= start <= end:
        raise LayoutError(f"tokens [{start}, {end}) are not a range: 0 <= start <= end")
    if start == end:
        return {}
    first = _atoms(source, target, start, end)
    count = np.diff(np.append(first, end))
    pair = source.owners(first) * target.num_shards + target.owners(first)
    # A stable sort of 16-bit keys is linear in their number.
    small = source.num_shards * target.num_shards <= 1 << 16
    order = np.argsort(pair.astype(np.uint16) if small else pair, kind="stable")
    first, count, pair = first[order], count[order], pair[order]
    src, dst = source.local_indices(first), target.local_indices(first)
    joined = (
        (pair[1:] == pair[:-1])
        & (src[:-1] + count[:-1] == src[1:])
        & (dst[:-1] + count[:-1] == dst[1:])
        & (src[1:] % source.block_size != 0)
        & (dst[1:] % target.block_size != 0)
    )
    heads = np.flatnonzero(np.append(True, ~joined))
    src, dst, pair, count = src[heads], dst[heads], pair[heads], np.add.reduceat(count, heads)
    bounds = [0, *(np.flatnonzero(np.diff(pair)) + 1).tolist(), len(pair)]
    found = {}
    for low, high in pairwise(bounds):
        at = slice(low, high)
        found[divmod(int(pair[low]), target.num_shards)] = Runs(
            src_column=src[at] // source.block_size,
            src_offset=src[at] % source.block_size,
            dst_column=dst[at] // target.block_size,
            dst_offset=dst[at] % target.block_size,
            count=count[at],
        )
    return found


def _atoms(source: Layout, target: Layout, start: int, end: int) -> Int64s:
    """First positions of the stretches of [start, end) in which neither side changes shard or block."""
    one, other = (layout.interleave if layout.num_shards > 1 else layout.block_size for layout in (source, target))
    if other % one == 0 or one % other == 0:
        later = _multiples(min(one, other), start, end)
    else:
        later = np.union1d(_multiples(one, start, end), _multiples(other, start, end))
    return np.concatenate([[start], later])


def _multiples(step: int, start: int, end: int) -> Int64s:
    return np.arange(start // step * step + step, end, step, dtype=np.int64)


def _slots(block_table: Int64s, block_size: int, column: Int64s, offset: Int64s, count: Int64s) -> Int64s:
    needed = int(column.max()) + 1 if len(column) else 0
    if len(column) and column.min() < 0:
        raise LayoutError(f"the block table begins {-int(column.min())} columns after the first one that the runs need")
    if needed > len(block_table):
        raise LayoutError(f"the block table has {len(block_table)} columns, the runs need {needed}")
    begun = np.cumsum(count) - count
    return np.repeat(block_table[column] * block_size + offset - begun, count) + np.arange(int(count.sum()))


def _named(side: Side) -> str:
    return "a latent head" if side.kv_heads is None else f"{side.kv_heads} KV heads"
