"""Runs: steps that the ranks of a set take by themselves after one that they were sent.

While nobody comes or goes, a decode step says nothing that the step before has not: the same rows, one token on. So the plan
allows some more of them, with blocks for all, and the coordinator hears their draws while the next one is already under way.
What changes the batch ends the run first (`Engine`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from coordinator.kv_blocks import KvBlocks
from coordinator.plan import Row, ScheduledStep
from coordinator.request import Request

MAX_AHEAD = 31
"""What a plan costs is then a few hundredths of a millisecond per step; blocks are taken so many tokens early."""


def lead(rows: Sequence[Row], requests: Mapping[int, Request], kv: KvBlocks, limit: int) -> tuple[int, tuple[Row, ...]]:
    """How many further steps these rows of a step may take, at most `limit`, and the rows with the blocks for them, which are
    given to the requests; requests by handle.

    0 when a row is none of decode. No run takes the last blocks: each running request can still have one on every member, so
    that nobody gives way sooner than without.
    """
    runners = [requests[row.handle] for row in rows]
    ahead = min(chain([limit], (_until_change(row, request) for row, request in zip(rows, runners, strict=True))))
    while ahead > 0:
        missing = [kv.missing(request, request.num_computed + 1 + ahead) for request in runners]
        if kv.has_room([sum(counts) + len(requests) for counts in zip(*missing, strict=True)]):
            break
        ahead //= 2
    if ahead <= 0:
        return 0, tuple(rows)
    grown = []
    for row, request, counts in zip(rows, runners, missing, strict=True):
        kv.grow(request, counts)
        before = [len(blocks) for blocks in row.new_blocks] or [0] * len(counts)
        grown.append(replace(row, new_blocks=kv.tail(request, [new + more for new, more in zip(before, counts, strict=True)])))
    return ahead, tuple(grown)


def moved_on(step: ScheduledStep, tokens: Mapping[int, int]) -> ScheduledStep:
    """The next step of a run; tokens: what the step has drawn, by handle."""
    rows = tuple(
        replace(row, start=row.start + 1, token_ids=(tokens[row.handle],), new_blocks=(), output_index=row.output_index + 1)
        for row in step.rows
    )
    facts = replace(step.facts, decode_context=step.facts.decode_context + len(rows))
    return replace(step, released=(), admitted=(), rows=rows, facts=facts, ahead=step.ahead - 1)


def _until_change(row: Row, request: Request) -> int:
    """Further draws of a row that are like its next one: no prompt is left, stop tokens stay banned or allowed."""
    if not row.sample or row.score_token_ids or row.start < request.num_prefill_tokens:
        return 0
    limit = request.sampling.min_tokens if row.ban_stop else request.sampling.max_tokens
    return limit - row.output_index - 1
