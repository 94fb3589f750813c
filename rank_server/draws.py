"""From hidden states to what a step answers: drawn tokens, and log-probabilities of prompts."""

from collections.abc import Callable

import torch
from torch import Tensor

from cp_wire.pb import common_pb2, rank_pb2
from rank_server.logprobs import Logprobs, rows_per_slice, score
from rank_server.sampler import Draw, sample
from rank_server.step_batch import StepBatch

LogitsOf = Callable[[Tensor], Tensor]
"""Hidden states [R, H] → logits [R, V] fp32; a collective of the TP group."""


def answer(
    batch: StepBatch, hidden: Tensor, logits_of: LogitsOf, vocab_size: int, samples: bool, progress: Callable[[], None]
) -> rank_pb2.StepResult:
    """`sampled` and `scores` of a step, on all members of a TP group: all compute logits, the one that samples answers.

    A request whose prompt can't be scored fails; its draw is not reported by the same rank. Replicas with less to answer than
    others compute logits of no rows, so that all ranks issue the same collectives.
    """
    result = rank_pb2.StepResult()
    failed = _score(batch, hidden, logits_of, vocab_size, samples, progress, result)
    if not batch.any_draws:
        return result
    logits = logits_of(hidden[batch.sample_rows])
    if samples:
        for handle, draw in zip(batch.draw_handles, sample(logits, batch.draws), strict=True):
            if handle not in failed:
                result.sampled.append(_sampled(handle, draw))
    return result


def _score(
    batch: StepBatch,
    hidden: Tensor,
    logits_of: LogitsOf,
    vocab_size: int,
    samples: bool,
    progress: Callable[[], None],
    result: rank_pb2.StepResult,
) -> set[int]:
    """Adds scores and errors to the result; returns the handles that failed. The slices follow from the plan alone."""
    indices = [row for each in batch.scores for row in each.rows]
    rows = torch.tensor(indices, dtype=torch.int64, device=hidden.device)
    tokens = [token for each in batch.scores for token in each.token_ids]
    tops = [each.top for each in batch.scores for _ in each.token_ids]
    width = rows_per_slice(vocab_size)
    scored: list[Logprobs | None] = []
    for first in range(0, batch.most_scored, width):
        logits = logits_of(hidden[rows[first : first + width]])
        if samples:
            scored += score(logits, tokens[first : first + width], tops[first : first + width])
        progress()
    failed: set[int] = set()
    if samples:
        remaining = iter(scored)
        for each in batch.scores:
            positions = [next(remaining) for _ in each.token_ids]
            if None in positions:
                failed.add(each.handle)
            else:
                messages = [_message(position) for position in positions if position]
                result.scores.add(handle=each.handle, start=each.start, positions=messages)
    for handle in failed:
        result.sampled.add(handle=handle, error="the logits of the prompt are not finite")
    return failed


def _sampled(handle: int, draw: Draw) -> rank_pb2.SampledToken:
    if draw.error is not None:
        return rank_pb2.SampledToken(handle=handle, error=draw.error)
    logprobs = None if draw.logprobs is None else _message(draw.logprobs)
    return rank_pb2.SampledToken(handle=handle, token_id=draw.token_id, logprobs=logprobs)


def _message(logprobs: Logprobs) -> common_pb2.PositionLogprobs:
    top = [common_pb2.TokenLogprob(token_id=token, logprob=logprob) for token, logprob in logprobs.top]
    return common_pb2.PositionLogprobs(sampled=logprobs.of_token, top=top)
