"""How much a group of members can hold, and where a request should start.

A *member* is one DCP group index; all its ranks hold the same block ids, so block counts are per member. Lengths are tokens.
"""

from collections.abc import Sequence

from cp_layout.errors import LayoutError
from cp_layout.interleave import Layout


def blocks_by_member(layout: Layout, length: int, shard_offset: int) -> list[int]:
    """Blocks that [0, L) of a request with this shard offset occupies on each member; [N] counts in member order.

    A member that owns no token of the last virtual block needs no block for it.
    """
    return [layout.blocks_needed(layout.shard_on(member, shard_offset), length) for member in range(layout.num_shards)]


def fits_ever(layout: Layout, length: int, blocks_per_member: int) -> bool:
    """Whether empty pools of `blocks_per_member` blocks each could hold [0, L), whatever the shard offset.

    The fullest shard decides, and with equal pools no offset changes that.
    """
    return max(blocks_by_member(layout, length, 0)) <= blocks_per_member


def group_capacity_tokens(layout: Layout, blocks_per_member: int) -> int:
    """Length of the longest request that fits empty pools: N·B·blocks, for every interleave.

    The next token would open a virtual block, whose first token belongs to shard 0.
    """
    return layout.virtual_block_size * blocks_per_member


def roomiest_offset(layout: Layout, length: int, free_by_member: Sequence[int]) -> int:
    """Shard offset that leaves the fullest member the most free blocks once [0, L) is placed; ties to the lowest offset.

    free_by_member: [N] free blocks before placement. Otherwise shard 0 of every request would land on member 0, and short
    requests would fill it first. The result says nothing about whether the request fits now. `LayoutError` when the
    number of pools is not N.
    """
    n = layout.num_shards
    if len(free_by_member) != n:
        raise LayoutError(f"{len(free_by_member)} members have a pool, but the layout has {n} KV shards")
    needed = blocks_by_member(layout, length, 0)
    left = [min(free_by_member[layout.member_of(r, offset)] - needed[r] for r in range(n)) for offset in range(n)]
    return left.index(max(left))
