"""Leases and pulls of a hand-over: what they name, how long they hold, and what becomes of requests whose moves fail."""

import asyncio
from dataclasses import replace
from time import perf_counter

import pytest

from coordinator.app import Options
from cp_wire import errors
from tests.coordinator.fake_rank import continuation
from tests.coordinator.handover import FAIL, FINAL, PROMPT, TRANSIENT, causes, rows_of
from tests.coordinator.harness import FAST, cluster, eventually


@pytest.mark.parametrize("layout", [{"interleave": 1}, {}], ids=["I = 1", "I = B"])
async def test_a_block_is_named_once_on_either_side_however_many_ranges_a_prompt_has(layout):
    side = {"pcp": 2, "dcp": 2, **layout}
    async with cluster(prefill=side, **side) as harness:
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await harness.until_idle()
        for rank in harness.ranks[:2]:
            named = [block for request in rank.kv.lease_requests for block in request.block_ids]
            assert len(named) == len(set(named)) > 0
        for rank in harness.ranks[2:]:
            assert len(rank.kv.pulls) > 1
            for request in rank.kv.pulls:
                mine = rank.kv.layout.columns(rank.kv.shard_of(request), request.start, request.end)
                assert (request.first_column, len(request.block_ids)) == (mine.start, len(mine))


async def test_leases_are_prolonged_while_a_chunk_computes():
    timings = replace(FAST, lease_s=0.15)
    async with cluster(prefill={}, timings=timings) as harness:
        source = harness.ranks[0]
        renewed: list[int] = []
        lease = source.kv.lease

        async def count(request):
            source.gate.clear()
            renewed.append(request.tokens)
            return await lease(request)

        source.kv.lease = count
        call = asyncio.create_task(harness.generate([1] * 100))
        await eventually(lambda: len(renewed) > 3)
        assert len(source.steps) < 7, "the prompt is not through"
        source.kv.lease = lease
        source.gate.set()
        assert (await call).token_ids == continuation([1] * 100, 8)
        await harness.until_idle()


async def test_h8_a_failed_range_is_tried_again_after_longer_and_longer_pauses():
    """The last of the three attempts succeeds."""
    async with cluster(prefill={}, timings=replace(FAST, move_again_s=0.2)) as harness:
        harness.ranks[1].kv.failures = [TRANSIENT, TRANSIENT]
        began = perf_counter()
        heard = await harness.generate([1] * 9)
        assert perf_counter() - began > 0.2 + 0.4
        assert heard.token_ids == continuation([1] * 9, 8)
        assert not (await harness.status()).transfers.recomputed
        assert [(pull.start, pull.end) for pull in harness.ranks[1].kv.pulls] == [(0, 9)] * 3
        await harness.until_idle()


async def test_of_several_moves_at_once_one_fails():
    async with cluster(prefill={}) as harness:
        target = harness.ranks[1]
        target.kv.gate.clear()
        calls = [asyncio.create_task(harness.generate([number] * 9)) for number in (1, 2, 3)]
        await eventually(lambda: len(target.kv.writing) == 3)
        target.kv.failures = [FINAL]
        target.kv.gate.set()
        assert [(await call).token_ids for call in calls] == [continuation([number] * 9, 8) for number in (1, 2, 3)]
        transfers = (await harness.status()).transfers
        assert (transfers.requests, causes(transfers.recomputed)) == (2, {"LEASE_ENDED": 1})
        assert [row.start for number in (1, 2, 3) for row in rows_of(target, number)[:1]].count(0) == 1
        await harness.until_idle()


@pytest.mark.parametrize("failures", [[TRANSIENT] * 3, [FINAL]], ids=["three times", "for good"])
async def test_h20_a_lost_range_is_recomputed_and_counted(failures, caplog):
    async with cluster(prefill={}) as harness:
        harness.ranks[1].kv.failures = list(failures)
        heard = await harness.generate(PROMPT)
        assert heard.token_ids == continuation(PROMPT, 8)
        assert heard.finished.route.reason == f"recomputed after {failures[0].reason}"
        status = await harness.status()
        assert causes(status.transfers.recomputed) == {failures[0].reason: 1} and status.transfers.requests == 0
        await harness.until_idle()
        (line, *_) = [record for record in caplog.records if "did not come over" in record.getMessage()]
        assert {"session", "tokens", "attempt", "cause", "why"} <= line.fields.keys()


async def test_h20_the_policy_fail_ends_the_request_with_the_cause():
    async with cluster(prefill={}, options=FAIL) as harness:
        harness.ranks[1].kv.failures = [FINAL]
        heard = await harness.generate(PROMPT)
        assert isinstance(heard.error, errors.Unavailable) and heard.error.retryable
        assert heard.error.message == "the request's KV could not be moved: LEASE_ENDED"
        assert causes((await harness.status()).transfers.failed) == {"LEASE_ENDED": 1}
        await harness.until_idle()
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)


async def test_what_has_moved_is_not_recomputed():
    async with cluster(prefill={}) as harness:
        target = harness.ranks[1]
        pulled = asyncio.create_task(target.kv.hold())
        call = asyncio.create_task(harness.generate(PROMPT))
        await pulled
        first = len(target.kv.pulls)
        target.kv.gate.set()
        await eventually(lambda: len(target.kv.pulls) > first)
        target.kv.failures = [FINAL]
        assert (await call).token_ids == continuation(PROMPT, 8)
        assert rows_of(target)[0].start == 16
        await harness.until_idle()


async def test_a_refused_lease_is_a_failed_move():
    async with cluster(prefill={}) as harness:
        harness.ranks[0].kv.refuse_lease = errors.InvalidRequest("block_ids", 7, "no")
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        assert causes((await harness.status()).transfers.recomputed) == {"INVALID_REQUEST": 1}
        await harness.until_idle()


@pytest.mark.parametrize("policy", [Options(), FAIL], ids=["recompute", "fail"])
async def test_h10_a_pull_that_never_answers_has_a_deadline(policy):
    timings = replace(FAST, pull_s=0.1, beside_s=0.1)
    async with cluster(prefill={}, timings=timings, options=policy) as harness:
        harness.ranks[1].kv.gate.clear()
        heard = await harness.generate(PROMPT)
        if policy is FAIL:
            assert heard.error.message == "the request's KV could not be moved: DEADLINE_EXCEEDED"
        else:
            assert heard.token_ids == continuation(PROMPT, 8)
        await harness.until_idle()
