"""One step's attention work as this rank sees it: a pure function of the plan and the rank's place."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
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
    run_columns: tuple[int, ...] = field(init=False)
    """Columns of the block table where a run of consecutive block ids begins: the keys of a run are one view of the cache."""
    run_blocks: tuple[int, ...] = field(init=False)
    """The block ids at these columns."""

    def __post_init__(self) -> None:
        ids = self.block_table
        breaks = (ids.diff() != 1).nonzero().flatten() + 1
        columns = (0, *breaks.tolist()) if len(ids) > 0 else ()
        object.__setattr__(self, "run_columns", columns)
        object.__setattr__(self, "run_blocks", tuple(ids[list(columns)].tolist()))


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """All rows of a step."""

    rows: tuple[AttentionRow, ...]
    slots: Tensor
    """[T] int64 slot of each token on this rank, −1 = another shard owns it."""
    visible: Tensor
    """[T] int64 keys on this shard that each query may see: local_len(r, position + 1)."""
