"""One step's attention work as this rank sees it: a pure function of the plan and the rank's place."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor


class BlockRuns(NamedTuple):
    """Runs of consecutive block ids in a block table: the keys of a run are one view of the cache."""

    columns: list[int]
    """Of the table, where a run begins."""
    blocks: list[int]
    """The block ids at these columns."""


@dataclass(frozen=True)
class AttentionRow:
    """One request in the step: q_len consecutive query tokens, rows [q_start, q_start + q_len) of the flat batch."""

    q_start: int
    q_len: int
    block_table: Tensor
    """[columns] int64, this rank's blocks of the request in order."""
    local_len: int
    """Keys on this shard once the step's own tokens are written; 0 = this shard has nothing for the row."""
    first_visible: int
    """Keys on this shard that the row's first query sees; the last one sees `local_len`."""

    @cached_property
    def runs(self) -> BlockRuns:
        """Of the block table; found when first asked for, as few kernels read the cache by runs and a step has many blocks."""
        ids = self.block_table
        if len(ids) == 0:
            return BlockRuns([], [])
        breaks = (ids.diff() != 1).nonzero().flatten() + 1
        return BlockRuns([0, *breaks.tolist()], [int(ids[0]), *ids[breaks].tolist()])


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """All rows of a step."""

    rows: tuple[AttentionRow, ...]
    slots: Tensor
    """[T] int64 slot of each token on this rank, −1 = another shard owns it."""
    visible: Tensor
    """[T] int64 keys on this shard that each query may see: local_len(r, position + 1)."""
