"""From a plan to this rank's view of it: tokens, positions, slots, visible lengths, rows to draw from."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cp_layout.interleave import NOT_MINE, Layout
from cp_wire.pb import rank_pb2
from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.penalties import TokenHistory
from rank_server.sampler import RowSampling
from rank_server.sequences import PlanRefused, Sequence, SequenceSampling, SequenceTable

HistoryOf = Callable[[rank_pb2.AdmittedRequest], TokenHistory | None]
"""What a rank keeps of an admitted request's tokens; None where nothing depends on them."""


def no_history(admitted: rank_pb2.AdmittedRequest) -> None:
    """For ranks that don't draw."""


@dataclass(frozen=True, slots=True)
class RowScores:
    """Consecutive prompt tokens of one request that are scored."""

    handle: int
    first: int
    """Row of the flat batch whose logits score the first of them."""
    token_ids: tuple[int, ...]
    top: int
    """Alternatives to report with each."""


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
    scores: tuple[RowScores, ...]


def take_in(
    plan: rank_pb2.StepPlan, sequences: SequenceTable, layout: Layout, member: int, history_of: HistoryOf = no_history
) -> None:
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
                    min_p=sampling.min_p,
                    bias=tuple(zip(sampling.bias_token_ids, sampling.biases, strict=True)),
                    logprobs=sampling.logprobs,
                    prompt_logprobs=sampling.prompt_logprobs,
                ),
                num_computed=admitted.num_cached_tokens,
                history=history_of(admitted),
            )
        )


def keep_history(admitted: rank_pb2.AdmittedRequest, vocab_size: int, device: torch.device) -> TokenHistory | None:
    """History of an admitted request, its cached tokens taken; None for a request without penalties."""
    sampling = admitted.sampling
    repetition = sampling.repetition_penalty or 1.0
    if repetition == 1 and sampling.presence_penalty == sampling.frequency_penalty == 0:
        return None
    if len(admitted.cached_token_ids) != admitted.num_cached_tokens:
        raise PlanRefused(
            f"request {admitted.handle}: {admitted.num_cached_tokens} tokens are cached, "
            f"{len(admitted.cached_token_ids)} are named for its penalties"
        )
    history = TokenHistory(
        repetition, sampling.presence_penalty, sampling.frequency_penalty, admitted.num_prompt_tokens, vocab_size, device
    )
    history.take(0, torch.tensor(list(admitted.cached_token_ids), dtype=torch.int64))
    return history


def build(plan: rank_pb2.StepPlan, sequences: SequenceTable, layout: Layout, member: int) -> StepBatch:
    """Appends the plan's new blocks, takes its tokens into the histories and computes the rank's view.

    Committed lengths change only in `commit`.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    visible: list[int] = []
    rows: list[AttentionRow] = []
    sample_rows: list[int] = []
    draws: list[RowSampling] = []
    draw_handles: list[int] = []
    scores: list[RowScores] = []
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
        if sequence.history is not None:
            sequence.history.take(row.start, torch.tensor(token_ids[q_start:], dtype=torch.int64))
        if row.score_token_ids:
            scores.append(_scores(row, sequence, q_start))
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
        scores=tuple(scores),
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


def _scores(row: rank_pb2.StepRow, sequence: Sequence, q_start: int) -> RowScores:
    """The logits of position p − 1 score the token at p."""
    before, count = row.score_start - 1 - row.start, len(row.score_token_ids)
    if before < 0 or before + count > len(row.token_ids):
        raise PlanRefused(
            f"request {row.handle}: tokens {row.start} to {row.start + len(row.token_ids)} can't score {count} tokens "
            f"from {row.score_start}"
        )
    return RowScores(row.handle, q_start + before, tuple(row.score_token_ids), sequence.sampling.prompt_logprobs)


def _row_sampling(row: rank_pb2.StepRow, sequence: Sequence) -> RowSampling:
    sampling = sequence.sampling
    return RowSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        output_index=row.output_index,
        ban=sampling.stop_token_ids if row.ban_stop else (),
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
        min_p=sampling.min_p,
        bias=sampling.bias,
        history=sequence.history,
    )
