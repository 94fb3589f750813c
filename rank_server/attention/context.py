"""Gathering cached context from all shards, in pieces of a bounded workspace."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cp_layout.interleave import Layout
from cp_layout.reorg import Segment, context_pieces, gathered_rows
from rank_server.attention.rows import KvRow


@dataclass(frozen=True, slots=True)
class ContextUse:
    """Which of the gathered keys belong to a row of which this rank computes a part."""

    row: int
    """Index of the row in its step."""
    keys: tuple[slice, ...]
    """Which of the gather's [N·rows], ascending: runs between which there is padding or what belongs to others. The row's
    queries come after all of them."""

    def out_of(self, gathered: Tensor) -> Tensor:
        """The keys [n, …] of [N·rows, …]; a view where they stand together, else one copy of each run."""
        parts = [gathered[run] for run in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class ContextPiece:
    """One gather."""

    slots: Tensor
    """[rows] int64 what this rank brings; padding repeats slots of its own."""
    uses: tuple[ContextUse, ...]


def context_gathers(
    rows: Sequence[tuple[int, KvRow]],
    used: set[int],
    layout: Layout,
    row_bytes: int,
    workspace_bytes: int,
    device: torch.device,
) -> tuple[ContextPiece, ...]:
    """The gathers that bring the context of rows (index in the step, row); the same number and sizes on all ranks.

    used: indices of the rows that this rank computes a part of; row_bytes: one token in one layer.
    """
    rows = [(index, row) for index, row in rows if row.start > 0]
    least = layout.num_shards * layout.interleave
    pieces = context_pieces([row.start for _, row in rows], layout, max(workspace_bytes // row_bytes, least))
    gathers = []
    for piece in pieces:
        slots = np.concatenate([_slots(layout, rows[segment.context][1], segment) for segment in piece.segments])
        uses = []
        for segment in piece.segments:
            index, row = rows[segment.context]
            if index in used:
                keys = gathered_rows(layout, row.start, segment, piece.rows, row.shard_offset)
                uses.append(ContextUse(index, runs_of(keys)))
        gathers.append(ContextPiece(torch.from_numpy(slots).to(device), tuple(uses)))
    return tuple(gathers)


def runs_of(keys: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[slice, ...]:
    """Ascending indices, at least one, as ranges of neighbours."""
    after = np.flatnonzero(np.diff(keys) != 1) + 1
    starts, stops = keys[np.r_[0, after]], keys[np.r_[after - 1, -1]] + 1
    return tuple(slice(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True))


def _slots(layout: Layout, row: KvRow, segment: Segment) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[rows] slots of the segment on this rank; rows beyond its tokens repeat the last one, or name slot 0 when it has none."""
    last = layout.local_len(row.shard, row.start) - 1
    if last < 0:
        return np.zeros(segment.rows, dtype=np.int64)
    local = np.minimum(np.arange(segment.first, segment.first + segment.rows), last)
    return layout.slots_of_local(row.block_table.numpy(), local)
