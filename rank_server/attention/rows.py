"""The rows of a step over this rank's part of their KV, and what attention needs to know of any part of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cp_layout.interleave import NOT_MINE, Layout
from rank_server.attention.batch import AttentionBatch, AttentionRow


@dataclass(frozen=True, slots=True)
class KvRow:
    """One row of a plan: consecutive tokens of one request, all earlier ones of which are in the cache."""

    start: int
    """Absolute position of the first token."""
    count: int
    shard: int
    """Which shard of the request's KV this rank holds."""
    shard_offset: int
    """Shard r of the request lies on member (r + shard_offset) mod N."""
    block_table: Tensor
    """[columns] int64, this rank's blocks of the request in order."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of one row's tokens."""

    row: int
    """Index of the row in its step."""
    start: int
    """Absolute position of the run's first token."""
    count: int


def whole(rows: Sequence[KvRow]) -> tuple[Span, ...]:
    """Every row as one run."""
    return tuple(Span(index, row.start, row.count) for index, row in enumerate(rows))


def attention_batch(rows: Sequence[KvRow], spans: Sequence[Span], layout: Layout, device: torch.device) -> AttentionBatch:
    """What this rank's cache holds for the queries of the spans, one span after the other; slots are those of their own tokens.

    The cache is taken to hold every token up to each query, its own included.
    """
    visible: list[int] = []
    attended: list[AttentionRow] = []
    for span in spans:
        row, q_start, end = rows[span.row], len(visible), span.start + span.count
        if span.count == 1:
            visible.append(layout.local_len(row.shard, end))
        else:
            visible.extend(layout.local_lens_at(row.shard, np.arange(span.start + 1, end + 1)).tolist())
        attended.append(
            AttentionRow(
                q_start=q_start,
                q_len=span.count,
                block_table=row.block_table,
                local_len=visible[-1],
                first_visible=visible[q_start],
            )
        )
    return AttentionBatch(
        rows=tuple(attended),
        slots=slots_of(rows, spans, layout, device),
        visible=torch.tensor(visible, dtype=torch.int64, device=device),
    )


def gathered_batch(
    rows: Sequence[KvRow], members: Sequence[Sequence[Span]], layout: Layout, device: torch.device
) -> AttentionBatch:
    """The same of queries in gather order: each member's spans, then surplus that makes its queries as many as the fullest's.

    Surplus is of no row, sees no key and has no slot.
    """
    counts = [sum(span.count for span in spans) for spans in members]
    batch = attention_batch(rows, [span for spans in members for span in spans], layout, device)
    width = max(counts)
    if min(counts) == width:
        return batch
    surplus = np.cumsum([0, *(width - count for count in counts[:-1])])
    of_row = np.repeat(surplus, [len(spans) for spans in members]).tolist()
    places = torch.from_numpy(np.arange(sum(counts)) + np.repeat(surplus, counts)).to(device)

    def spread(x: Tensor, nothing: int) -> Tensor:
        return x.new_full((len(counts) * width,), nothing).index_copy_(0, places, x)

    return AttentionBatch(
        rows=tuple(replace(row, q_start=row.q_start + more) for row, more in zip(batch.rows, of_row, strict=True)),
        slots=spread(batch.slots, NOT_MINE),
        visible=spread(batch.visible, 0),
    )


def slots_of(rows: Sequence[KvRow], spans: Sequence[Span], layout: Layout, device: torch.device) -> Tensor:
    """[T] int64 slot of each token of the spans, one span after the other; −1 where another shard owns it."""
    slots: list[int] = []
    for span in spans:
        row = rows[span.row]
        if span.count == 1:
            slots.append(_slot(layout, row, span.start))
        else:
            positions = np.arange(span.start, span.start + span.count)
            slots.extend(layout.slots(row.shard, row.block_table.numpy(), positions).tolist())
    return torch.tensor(slots, dtype=torch.int64, device=device)


def _slot(layout: Layout, row: KvRow, position: int) -> int:
    if layout.owner(position) != row.shard:
        return NOT_MINE
    block = int(row.block_table[layout.block_column(position)])
    return block * layout.block_size + layout.block_offset(position)
