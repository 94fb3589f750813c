"""Runs: steps that the ranks of a set take by themselves after one that they were sent (`StepPlan.ahead`)."""

from collections.abc import Callable
from functools import partial
from time import perf_counter_ns

import torch

from cp_wire.pb import rank_pb2
from rank_server.collectives.base import Group
from rank_server.sequences import SequenceTable

Report = Callable[[rank_pb2.StepResult | None, int], None]
"""Takes the result of a step that the run goes on after, None from a member that has drawn nothing in it, and the microseconds
that the step took."""

EVERY_TICKET = 2**64 - 1
"""More than any run has: for a process that ends."""

_NOT_MINE = -1


def run(
    plan: rank_pb2.StepPlan,
    step: Callable[[rank_pb2.StepPlan, Callable[[], None]], rank_pb2.StepResult],
    sequences: SequenceTable,
    group: Group,
    device: torch.device,
    wants_end: Callable[[], bool],
    report: Report,
) -> rank_pb2.StepResult:
    """Computes a plan and the further steps that it allows, as long as every member of the group (all ranks of the set) goes
    on; the result of the last one. The plan is changed.

    Every step before the last is reported once the pass of the next one has begun: until then whoever passes the message on
    would hold this thread up. Between two steps the members exchange [1 + rows] int64: whether they go on, and what they have
    drawn. The exchange is part of the step before it.
    """
    started = perf_counter_ns()
    result = step(plan, _nothing)
    for index in range(1, plan.ahead + 1):
        exchanged_s = group.seconds
        tokens = _agree(plan, result, sequences, group, device, wants_end())
        result.collective_us += round(1e6 * (group.seconds - exchanged_s))
        if tokens is None:
            break
        before, taken, started = result, perf_counter_ns() - started, perf_counter_ns()
        _move_on(plan, tokens)
        result = step(plan, partial(report, before if before.sampled else None, taken // 1000))
        result.index = index
    return result


def _nothing() -> None:
    """A first step has none before it."""


def _agree(
    plan: rank_pb2.StepPlan,
    result: rank_pb2.StepResult,
    sequences: SequenceTable,
    group: Group,
    device: torch.device,
    wants_end: bool,
) -> list[int] | None:
    """What the step has drawn, row by row, the same on all members; None = the run is over."""
    drawn = {token.handle: token.token_id for token in result.sampled if not token.error}
    ends = wants_end or len(drawn) < len(result.sampled)
    tokens = [drawn.get(row.handle, _NOT_MINE) for row in plan.rows]
    for row, token in zip(plan.rows, tokens, strict=True):
        ends = ends or (not row.ban_stop and token in sequences.get(row.handle).sampling.stop_token_ids)
    if group.size > 1:
        said = group.all_gather(torch.tensor([ends, *tokens], dtype=torch.int64, device=device)).amax(0)
        ends, *tokens = said.tolist()
    return None if ends else tokens


def _move_on(plan: rank_pb2.StepPlan, tokens: list[int]) -> None:
    """Makes the plan that of the next step."""
    del plan.released[:], plan.admitted[:]
    for row, token in zip(plan.rows, tokens, strict=True):
        row.start += 1
        row.output_index += 1
        row.token_ids[:] = [token]
        del row.new_block_ids[:], row.new_block_counts[:]
