"""How cached context is gathered from its shards piece by piece, through a workspace whose size does not depend on it.

A piece takes the same local indices of every shard, so that all members bring equally many rows and the bounds of the pieces
follow from the layout alone. The last rows of a shard may be padding. Keys arrive shard after shard, out of order: legal,
because every query of the step comes after all of the context.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cp_layout.errors import LayoutError
from cp_layout.interleave import Layout

Ints = NDArray[np.int64]

WORKSPACE_BYTES = 32 * 1024 * 1024
"""Bound on what one gather brings, in one layer; at least one run of I tokens of every shard is brought."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of one context in a piece: its local indices [first, first + rows) on every shard."""

    context: int
    """Index of the context."""
    first: int
    rows: int
    at: int
    """First row of the segment in the piece."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one gather brings: `rows` rows of every member."""

    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        """Rows of one member, padding included."""
        return sum(segment.rows for segment in self.segments)


def padded_local_len(layout: Layout, length: int) -> int:
    """Rows that every shard brings for a context of L tokens: ceil(L / (N·I))·I."""
    return -(-length // (layout.num_shards * layout.interleave)) * layout.interleave


def context_pieces(contexts: Sequence[int], layout: Layout, workspace_rows: int) -> tuple[Piece, ...]:
    """Cuts contexts, given by their lengths, into pieces of at most `workspace_rows` rows of all members together.

    Neighbouring contexts that fit as a whole share a piece; one that is too long is cut at multiples of I. An empty context
    needs nothing and ends a piece. Raises `LayoutError` when the workspace does not hold N·I rows.
    """
    i = layout.interleave
    room = workspace_rows // layout.num_shards // i * i
    if room == 0:
        raise LayoutError(
            f"a workspace of {workspace_rows} rows holds less than one run of {i} tokens of each of {layout.num_shards} shards"
        )
    pieces: list[list[Segment]] = [[]]
    used = 0
    for index, length in enumerate(contexts):
        rows = padded_local_len(layout, length)
        if rows == 0 or used + rows > room:
            pieces.append([])
            used = 0
        for first in range(0, rows, room):
            if first > 0:
                pieces.append([])
                used = 0
            taken = min(room, rows - first)
            pieces[-1].append(Segment(index, first, taken, used))
            used += taken
    return tuple(Piece(tuple(segments)) for segments in pieces if segments)


def real_rows(layout: Layout, length: int, segment: Segment, shard: int) -> int:
    """How many rows of the segment are keys of the shard; the rest is padding."""
    return min(max(layout.local_len(shard, length) - segment.first, 0), segment.rows)


def gathered_rows(layout: Layout, length: int, segment: Segment, piece_rows: int, shard_offset: int) -> Ints:
    """Where the real keys of a segment stand in the gather [N·piece_rows] of its piece, member after member."""
    parts = []
    for member in range(layout.num_shards):
        count = real_rows(layout, length, segment, layout.shard_on(member, shard_offset))
        parts.append(np.arange(count, dtype=np.int64) + member * piece_rows + segment.at)
    return np.concatenate(parts)
