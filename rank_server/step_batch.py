"""From a plan to this rank's view of it: rows over its cache, tokens and positions it computes, rows to draw from."""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_layout.interleave import Layout
from cp_wire.pb import common_pb2, rank_pb2
from rank_server.attention.rows import KvRow, Span
from rank_server.penalties import TokenHistory
from rank_server.sampler import RowSampling
from rank_server.sequences import PlanRefused, Sequence, SequenceSampling, SequenceTable
from rank_server.share import Share

HistoryOf = Callable[[rank_pb2.AdmittedRequest], TokenHistory | None]
"""What a rank keeps of an admitted request's tokens; None where nothing depends on them."""


def no_history(admitted: rank_pb2.AdmittedRequest) -> None:
    """For ranks that don't draw."""


@dataclass(frozen=True, slots=True)
class RowScores:
    """Consecutive prompt tokens of one request that are scored."""

    handle: int
    start: int
    """Position of the first of them."""
    first: int
    """Row of the flat batch whose logits score it."""
    token_ids: tuple[int, ...]
    top: int
    """Alternatives to report with each."""

    @property
    def rows(self) -> range:
        """Rows of the flat batch, one per token."""
        return range(self.first, self.first + len(self.token_ids))


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One replica's forward pass: T tokens of several requests, one after the other; T may be 0."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64 absolute positions."""
    sample_rows: Tensor
    """[R] int64 rows of the flat batch that a draw of this replica's follows."""
    draws: tuple[RowSampling, ...]
    draw_handles: tuple[int, ...]
    scores: tuple[RowScores, ...]
    """Prompt tokens that this replica scores."""
    answered: Tensor | None
    """[A] int64, ascending: the rows that draws or scores follow from; None: all rows."""
    any_draws: bool
    """Whether any replica draws."""
    most_scored: int
    """Tokens scored by the replica that scores most."""


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
                shard_offset=admitted.shard_offset,
                owner=admitted.owner,
                num_prefill_tokens=admitted.num_prefill_tokens,
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
    history.take(0, torch.tensor(list(admitted.cached_token_ids), dtype=torch.int64, device="cpu"))
    return history


def hold(plan: rank_pb2.StepPlan, sequences: SequenceTable, layout: Layout, member: int) -> tuple[KvRow, ...]:
    """Appends the plan's new blocks and takes its tokens into the histories; the plan's rows over this rank's cache.

    Committed lengths change only in `commit`.
    """
    rows: list[KvRow] = []
    for row in plan.rows:
        sequence = sequences.get(row.handle)
        count = len(row.token_ids)
        if row.start != sequence.num_computed or count == 0:
            raise PlanRefused(
                f"request {row.handle}: {count} tokens start at {row.start}, the rank holds {sequence.num_computed} tokens"
            )
        _append_new_blocks(row, sequence, layout.num_shards, member)
        sequence.check_room(layout, row.start + count)
        if row.score_token_ids:
            _check_scores(row)
        if sequence.history is not None:
            sequence.history.take(row.start, torch.tensor(list(row.token_ids), dtype=torch.int64, device="cpu"))
        rows.append(KvRow(row.start, count, sequence.shard, sequence.shard_offset, sequence.block_table))
    return tuple(rows)


def build(plan: rank_pb2.StepPlan, sequences: SequenceTable, share: Share, device: torch.device) -> StepBatch:
    """The replica's share of a plan that `hold` has seen, its tensors on `device`."""
    token_ids: list[int] = []
    positions: list[int] = []
    sample_rows: list[int] = []
    draws: list[RowSampling] = []
    draw_handles: list[int] = []
    scores: list[RowScores] = []
    for span in share.spans:
        row, first, end = plan.rows[span.row], len(token_ids), span.start + span.count
        token_ids.extend(row.token_ids[span.start - row.start : end - row.start])
        positions.extend(range(span.start, end))
        if not share.answers:
            continue
        if row.score_token_ids:
            scores.extend(_scores(row, span, first, sequences.get(row.handle)))
        if row.sample and end == row.start + len(row.token_ids):
            sample_rows.append(len(token_ids) - 1)
            draws.append(_row_sampling(row, sequences.get(row.handle)))
            draw_handles.append(row.handle)
    answered = sorted({*sample_rows, *(row for each in scores for row in each.rows)})
    return StepBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
        draws=tuple(draws),
        draw_handles=tuple(draw_handles),
        scores=tuple(scores),
        answered=None if len(answered) == len(token_ids) else torch.tensor(answered, dtype=torch.int64, device=device),
        any_draws=any(row.sample for row in plan.rows),
        most_scored=_most_scored(plan, share.answered) if any(row.score_token_ids for row in plan.rows) else 0,
    )


def commit(plan: rank_pb2.StepPlan, sequences: SequenceTable) -> None:
    """After the pass: the rows' tokens are in the cache."""
    for row in plan.rows:
        sequence = sequences.get(row.handle)
        sequence.num_computed += len(row.token_ids)
        if plan.decode_mode == common_pb2.DECODE_MODE_OWNER and row.start >= sequence.num_prefill_tokens:
            sequence.decoded_by_owner = True


def fresh_blocks(plan: rank_pb2.StepPlan, layout: Layout, member: int) -> list[int]:
    """Blocks of this rank that have a new owner with the plan; those of prefix hits are handed around unchanged."""
    cached = {
        admitted.handle: layout.blocks_needed(layout.shard_on(member, admitted.shard_offset), admitted.num_cached_tokens)
        for admitted in plan.admitted
    }
    return [
        block
        for row in plan.rows
        if row.new_block_counts
        for block in _new_blocks(row, layout.num_shards, member)[cached.get(row.handle, 0) :]
    ]


def _append_new_blocks(row: rank_pb2.StepRow, sequence: Sequence, members: int, member: int) -> None:
    if not row.new_block_counts:
        if row.new_block_ids:
            raise PlanRefused(f"request {row.handle}: {len(row.new_block_ids)} new blocks without counts")
        return
    mine = _new_blocks(row, members, member)
    if mine:
        sequence.append_blocks(mine)


def _new_blocks(row: rank_pb2.StepRow, members: int, member: int) -> list[int]:
    """The member's part of a row's new blocks, which have counts."""
    counts = row.new_block_counts
    if len(counts) != members or sum(counts) != len(row.new_block_ids):
        raise PlanRefused(
            f"request {row.handle}: {list(counts)} do not match {members} members and {len(row.new_block_ids)} new blocks"
        )
    first = sum(counts[:member])
    return list(row.new_block_ids[first : first + counts[member]])


def _check_scores(row: rank_pb2.StepRow) -> None:
    before, count = row.score_start - 1 - row.start, len(row.score_token_ids)
    if before < 0 or before + count > len(row.token_ids):
        raise PlanRefused(
            f"request {row.handle}: tokens {row.start} to {row.start + len(row.token_ids)} can't score {count} tokens "
            f"from {row.score_start}"
        )


def _scored(row: rank_pb2.StepRow, span: Span) -> range:
    """Positions that are scored by a span of the row: the logits of position p − 1 score the token at p."""
    return range(
        max(row.score_start, span.start + 1), min(row.score_start + len(row.score_token_ids), span.start + span.count + 1)
    )


def _scores(row: rank_pb2.StepRow, span: Span, first: int, sequence: Sequence) -> list[RowScores]:
    """first: the span's first row of the flat batch."""
    at = _scored(row, span)
    if not at:
        return []
    tokens = tuple(row.score_token_ids[at.start - row.score_start : at.stop - row.score_start])
    return [RowScores(row.handle, at.start, first + at.start - 1 - span.start, tokens, sequence.sampling.prompt_logprobs)]


def _most_scored(plan: rank_pb2.StepPlan, answered: Rows[Rows[Span]]) -> int:
    return max(sum(len(_scored(plan.rows[span.row], span)) for span in spans) for spans in answered)


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
