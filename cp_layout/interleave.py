"""Where a token's KV lives: ownership of positions by the shards of a KV shard group.

Notation: N = shards, I = interleave, B = block size, p = absolute token position, L = length in tokens, r = shard index.
A cache that is not sharded is the layout with N = 1. Positions are ≥ 0 unless a function says otherwise.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cp_layout.errors import LayoutError

NOT_MINE = -1
"""Slot of a token that the asking shard does not own."""


@dataclass(frozen=True, slots=True)
class Layout:
    """N shards, interleave I, B tokens per block; the laws of ownership hang off it.

    Raises `LayoutError` when N < 1, I < 1, B < 1, or (N > 1) I > B or B mod I != 0: a block must hold whole runs of I
    tokens, otherwise the blocks of one virtual block would not cover the same tokens.
    """

    num_shards: int
    interleave: int
    block_size: int

    def __post_init__(self) -> None:
        n, i, b = self.num_shards, self.interleave, self.block_size
        if n < 1:
            raise LayoutError(f"the number of KV shards must be at least 1, got {n}")
        if b < 1:
            raise LayoutError(f"the block size must be at least 1, got {b}")
        if i < 1:
            raise LayoutError(f"the interleave size must be at least 1, got {i}")
        if n > 1 and (i > b or b % i != 0):
            raise LayoutError(
                f"interleave size {i} must divide block size {b} (1 <= I <= B, B mod I = 0), or virtual blocks do not line up"
            )

    @property
    def virtual_block_size(self) -> int:
        """Tokens in one virtual block: N·B."""
        return self.num_shards * self.block_size

    def owner(self, position: int) -> int:
        """Shard that owns the position: (p // I) mod N."""
        return position // self.interleave % self.num_shards

    def local_index(self, position: int) -> int:
        """Rank of the position among its owner's tokens: (p // (N·I))·I + p mod I."""
        i = self.interleave
        return position // (self.num_shards * i) * i + position % i

    def block_column(self, position: int) -> int:
        """Column of the position in its owner's block table."""
        return self.local_index(position) // self.block_size

    def block_offset(self, position: int) -> int:
        """Offset of the position inside its block."""
        return self.local_index(position) % self.block_size

    def local_len(self, shard: int, length: int) -> int:
        """Tokens of [0, L) that shard r owns: (L // (N·I))·I + clamp(L mod (N·I) − r·I, 0, I).

        0 ≤ result ≤ L; `LayoutError` for L < 0.
        """
        if length < 0:
            raise LayoutError(f"a length must be at least 0, got {length}")
        i = self.interleave
        period = self.num_shards * i
        return length // period * i + min(max(length % period - shard * i, 0), i)

    def local_lens(self, length: int) -> list[int]:
        """`local_len` of every shard, in shard order."""
        return [self.local_len(shard, length) for shard in range(self.num_shards)]

    def blocks_needed(self, shard: int, length: int) -> int:
        """Blocks that shard r needs for [0, L); a shard without a token of the last virtual block needs none for it."""
        return -(-self.local_len(shard, length) // self.block_size)

    def columns(self, shard: int, start: int, end: int) -> range:
        """Columns of shard r's block table in which it has tokens of [start, end); empty when it has none."""
        first = self.local_len(shard, start)
        if first == self.local_len(shard, end):
            return range(0)
        return range(first // self.block_size, self.blocks_needed(shard, end))

    def virtual_blocks(self, length: int) -> int:
        """Virtual blocks that [0, L) touches: ceil(L / (N·B)); the columns of the longest block table."""
        return -(-length // self.virtual_block_size)

    def local_lens_at(self, shard: int, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """`local_len` of shard r for an array of lengths; same shape as the input, `LayoutError` if one is < 0."""
        if (lengths < 0).any():
            raise LayoutError(f"a length must be at least 0, got {int(lengths.min())}")
        i = self.interleave
        period = self.num_shards * i
        return lengths // period * i + np.clip(lengths % period - shard * i, 0, i)

    def owners(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """`owner` of an array of positions; same shape as the input."""
        return positions // self.interleave % self.num_shards

    def local_indices(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """`local_index` of an array of positions; same shape as the input."""
        i = self.interleave
        return positions // (self.num_shards * i) * i + positions % i

    def slots(self, shard: int, block_table: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots (block_id·B + offset) of the positions on shard r, −1 where r is not the owner.

        block_table: [columns] block ids of this shard; positions: [T], a negative one is padding and nobody's; returns [T].
        A position of the shard that lies beyond the table raises `LayoutError`.
        """
        b = self.block_size
        mine = (positions >= 0) & (self.owners(positions) == shard)
        local = self.local_indices(positions)
        column = np.where(mine, local // b, 0)
        if not mine.any():
            return np.full(positions.shape, NOT_MINE, dtype=np.int64)
        columns = int(column.max()) + 1
        if columns > len(block_table):
            raise LayoutError(f"the block table of shard {shard} has {len(block_table)} columns, a position needs {columns}")
        return np.where(mine, block_table[column] * b + local % b, NOT_MINE)

    def slots_of_local(self, block_table: NDArray[np.int64], local: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots of a shard's own tokens by their local index j ≥ 0; block_table: [columns] block ids of the shard.

        An index beyond the table raises `LayoutError`.
        """
        b = self.block_size
        if local.size and int(local.max()) // b >= len(block_table):
            raise LayoutError(f"the block table has {len(block_table)} columns, local index {local.max()} lies beyond them")
        return block_table[local // b] * b + local % b

    def member_of(self, shard: int, shard_offset: int) -> int:
        """Member of the group that holds shard r of a request with this offset."""
        return (shard + shard_offset) % self.num_shards

    def shard_on(self, member: int, shard_offset: int) -> int:
        """Shard that the member holds of a request with this offset; inverse of `member_of`."""
        return (member - shard_offset) % self.num_shards
