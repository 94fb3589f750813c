"""From a plan to this rank's view of it: tokens, positions, slots, visible lengths, rows to draw from."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cp_layout.interleave import NOT_MINE, Layout
from cp_wire.pb import rank_pb2
from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.sampler import RowSampling
from rank_server.sequences import PlanRefused, Sequence, SequenceSampling, SequenceTable


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass: T tokens of several requests, one after the other."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64 absolute positions."""
    attention: AttentionBatch
    sample_rows: Tensor
    """[R] int64 rows of the flat batch that a draw follows."""
    draws: tuple[RowSampling, ...]
    draw_handles: tuple[int, ...]


def take_in(plan: rank_pb2.StepPlan, sequences: SequenceTable, layout: Layout, member: int) -> None:
    """Applies releases, then admissions."""
    for handle in plan.released:
        sequences.release(handle)
    for admitted in plan.admitted:
        sampling = admitted.sampling
        sequences.admit(
            Sequence(
                handle=admitted.handle,
                shard=layout.shard_on(member, admitted.shard_offset),
                sampling=SequenceSampling(
                    temperature=sampling.temperature,
                    top_p=sampling.top_p or 1.0,
                    top_k=sampling.top_k,
                    seed=sampling.seed,
                    top_logprobs=sampling.top_logprobs,
                    stop_token_ids=tuple(sampling.stop_token_ids),
                ),
                num_computed=admitted.num_cached_tokens,
            )
        )


def build(plan: rank_pb2.StepPlan, sequences: SequenceTable, layout: Layout, member: int) -> StepBatch:
    """Appends the plan's new blocks and computes the rank's view; committed lengths change only in `commit`."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    visible: list[int] = []
    rows: list[AttentionRow] = []
    sample_rows: list[int] = []
    draws: list[RowSampling] = []
    draw_handles: list[int] = []
    for row in plan.rows:
        sequence = sequences.get(row.handle)
        count = len(row.token_ids)
        if row.start != sequence.num_computed or count == 0:
            raise PlanRefused(
                f"request {row.handle}: {count} tokens start at {row.start}, the rank holds {sequence.num_computed} tokens"
            )
        _append_new_blocks(row, sequence, layout.num_shards, member)
        end = row.start + count
        sequence.check_room(layout, end)
        q_start = len(token_ids)
        token_ids.extend(row.token_ids)
        positions.extend(range(row.start, end))
        if count == 1:
            slots.append(_slot(layout, sequence, row.start))
            visible.append(layout.local_len(sequence.shard, end))
        else:
            where = np.arange(row.start, end)
            slots.extend(layout.slots(sequence.shard, sequence.block_table.numpy(), where).tolist())
            visible.extend(layout.local_lens_at(sequence.shard, where + 1).tolist())
        rows.append(
            AttentionRow(
                q_start=q_start,
                q_len=count,
                block_table=sequence.block_table,
                local_len=visible[-1],
                first_visible=visible[q_start],
            )
        )
        if row.sample:
            sample_rows.append(len(token_ids) - 1)
            draws.append(_row_sampling(row, sequence))
            draw_handles.append(row.handle)
    return StepBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        attention=AttentionBatch(
            rows=tuple(rows),
            slots=torch.tensor(slots, dtype=torch.int64),
            visible=torch.tensor(visible, dtype=torch.int64),
        ),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
        draws=tuple(draws),
        draw_handles=tuple(draw_handles),
    )


def commit(plan: rank_pb2.StepPlan, sequences: SequenceTable) -> None:
    """After the pass: the rows' tokens are in the cache."""
    for row in plan.rows:
        sequences.get(row.handle).num_computed += len(row.token_ids)


def _append_new_blocks(row: rank_pb2.StepRow, sequence: Sequence, members: int, member: int) -> None:
    counts = row.new_block_counts
    if not counts:
        if row.new_block_ids:
            raise PlanRefused(f"request {row.handle}: {len(row.new_block_ids)} new blocks without counts")
        return
    if len(counts) != members or sum(counts) != len(row.new_block_ids):
        raise PlanRefused(
            f"request {row.handle}: {list(counts)} do not match {members} members and {len(row.new_block_ids)} new blocks"
        )
    first = sum(counts[:member])
    mine = list(row.new_block_ids[first : first + counts[member]])
    if mine:
        sequence.append_blocks(mine)


def _slot(layout: Layout, sequence: Sequence, position: int) -> int:
    if layout.owner(position) != sequence.shard:
        return NOT_MINE
    block = int(sequence.block_table[layout.block_column(position)])
    return block * layout.block_size + layout.block_offset(position)


def _row_sampling(row: rank_pb2.StepRow, sequence: Sequence) -> RowSampling:
    sampling = sequence.sampling
    return RowSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        output_index=row.output_index,
        ban=sampling.stop_token_ids if row.ban_stop else (),
        top_logprobs=sampling.top_logprobs,
    )
