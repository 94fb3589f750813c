"""Runs of steps on a whole coordinator: who changes the batch ends them, and nobody notices them otherwise."""

import asyncio

import pytest

from coordinator import engine, set_maker, text_worker
from coordinator.text_rows import to_text
from cp_wire import errors
from cp_wire.pb import coordinator_pb2, rank_pb2
from tests.coordinator.fake_rank import continuation
from tests.coordinator.harness import cluster, eventually, letters
from tests.coordinator.test_text_delivery import blocked


def starts(plans: list[rank_pb2.StepPlan]) -> list[rank_pb2.StepPlan]:
    """The plans that were sent, without those that the ranks made of them."""
    return [plan for plan, before in zip(plans, [None, *plans], strict=False) if before is None or plan.ticket != before.ticket]


async def held_in_a_run(harness, **fields: object) -> asyncio.Task:
    """A request whose next step waits on rank 0, in the midst of a run."""
    rank = harness.ranks[0]
    task = asyncio.create_task(harness.generate([1, 2, 3], **({"max_tokens": 60} | fields)))
    await eventually(lambda: len(rank.steps) > len(starts(rank.steps)))
    await rank.hold()
    return task


@pytest.mark.parametrize("shape", [{}, {"pcp": 2, "dcp": 2}, {"tp": 2}, {"tp": 2, "pcp": 2, "dcp": 2}])
async def test_a_lone_request_needs_few_plans(shape):
    async with cluster(**shape) as harness:
        heard = await harness.generate([1, 2, 3], max_tokens=100)
        assert heard.token_ids == continuation([1, 2, 3], 100)
        await harness.until_idle()
        for rank in harness.ranks:
            sent = [plan for plan in starts(rank.steps) if plan.rows]
            assert [plan.ahead for plan in sent] == [0, 31, 31, 31, 2]
            assert sum(len(plan.rows) for plan in rank.steps) == 100


async def test_a_new_request_ends_the_run_and_is_admitted_by_the_next_plan():
    async with cluster(pcp=2, dcp=2) as harness:
        task = await held_in_a_run(harness)
        rank = harness.ranks[0]
        running = rank.steps[-1].ticket
        other = asyncio.create_task(harness.generate([5, 6], max_tokens=3))
        await eventually(lambda: rank.run_to_end == running)
        rank.gate.set()
        assert (await other).token_ids == continuation([5, 6], 3)
        assert (await task).token_ids == continuation([1, 2, 3], 60)
        after = starts(rank.steps)[[plan.ticket for plan in starts(rank.steps)].index(running) + 1]
        assert len(after.admitted) == 1 and len(after.rows) == 2
        await harness.until_idle()


async def test_a_new_request_that_finds_no_seat_leaves_the_run_alone():
    async with cluster(pcp=2, dcp=2, max_num_seqs=1) as harness:
        task = await held_in_a_run(harness)
        rank = harness.ranks[0]
        running = rank.steps[-1].ticket
        other = asyncio.create_task(harness.generate([5, 6], max_tokens=3))
        async with asyncio.timeout(5):
            while (await harness.status()).waiting != 1:
                pass
        rank.gate.set()
        assert (await task).token_ids == continuation([1, 2, 3], 60)
        assert (await other).token_ids == continuation([5, 6], 3)
        assert rank.run_to_end < running
        await harness.until_idle()


async def test_an_abort_ends_the_run_and_the_other_request_goes_on():
    async with cluster(pcp=2, dcp=2) as harness:
        task = await held_in_a_run(harness)
        rank = harness.ranks[0]
        other = harness.call([9, 8], max_tokens=60)
        accepted = await other.read()
        rank.gate.set()
        await eventually(lambda: len(rank.steps[-1].rows) == 2 and rank.steps[-1].ticket == rank.steps[-2].ticket)
        await rank.hold()
        running = rank.steps[-1].ticket
        await harness.inference.Abort(coordinator_pb2.AbortRequest(request_id=accepted.accepted.request_id), timeout=5)
        await eventually(lambda: rank.run_to_end == running)
        rank.gate.set()
        assert (await task).token_ids == continuation([1, 2, 3], 60)
        await harness.until_idle()


async def test_a_stop_string_ends_the_run_and_nothing_after_it_is_told():
    stop = letters(continuation([1, 2, 3], 10))[4:10]
    async with cluster() as harness:
        heard = await harness.generate([1, 2, 3], max_tokens=100, stop=[stop])
        assert heard.finished.finish_reason == "stop"
        assert heard.text == letters(continuation([1, 2, 3], 4))
        await harness.until_idle()
        assert len(harness.ranks[0].steps) < 100


async def test_a_stop_token_ends_the_run_on_the_ranks():
    tokens = continuation([1, 2, 3], 100)
    at = next(index for index in range(5, 100) if tokens[index] not in tokens[:index])
    async with cluster(pcp=2, dcp=2) as harness:
        heard = await harness.generate([1, 2, 3], max_tokens=100, stop_token_ids=[tokens[at]])
        assert heard.finished.finish_reason == "stop" and heard.token_ids == tokens[: at + 1]
        await harness.until_idle()
        assert sum(len(plan.rows) for plan in harness.ranks[0].steps) == at + 1


async def test_a_row_that_fails_in_a_run_fails_its_request_alone():
    async with cluster(pcp=2, dcp=2) as harness:
        task = await held_in_a_run(harness)
        rank = harness.ranks[0]
        (handle,) = rank.sequences
        rank.fail_rows[handle] = "the logits are not finite"
        other = asyncio.create_task(harness.generate([5, 6], max_tokens=20))
        rank.gate.set()
        assert isinstance((await task).error, errors.Internal)
        assert (await other).token_ids == continuation([5, 6], 20)
        await harness.until_idle()


async def test_text_that_lags_ends_the_run(monkeypatch):
    monkeypatch.setattr(engine, "MAX_TEXT_BACKLOG", 4)
    async with cluster() as harness:
        rank = harness.ranks[0]
        with blocked(monkeypatch, text_worker, "to_text", to_text) as release:
            task = asyncio.create_task(harness.generate([1], max_tokens=100))
            await eventually(lambda: rank.run_to_end > 0)
            release.set()
            assert (await task).token_ids == continuation([1], 100)


async def test_a_rank_that_goes_on_after_an_end_is_not_believed(monkeypatch):
    """It overlooks the request's stop token."""
    tokens = continuation([1, 2, 3], 40)
    at = next(index for index in range(5, 20) if tokens[index] not in tokens[:index])
    async with cluster() as harness:
        monkeypatch.setattr(harness.ranks[0], "_ends", lambda row: False)
        heard = await harness.generate([1, 2, 3], max_tokens=40, stop_token_ids=[tokens[at]])
        assert "went on after the end of a request" in heard.error.message
        assert heard.token_ids == tokens[: min(at, len(heard.token_ids))]  # what the text thread still has is lost


async def test_a_fault_in_a_run_ends_it_for_ranks_that_would_go_on():
    async with cluster(pcp=2, dcp=2) as harness:
        task = await held_in_a_run(harness)
        rank = harness.ranks[0]
        running = rank.steps[-1].ticket
        rank.count_wrong = 1
        rank.gate.set()
        assert "block tables hold" in (await task).error.message
        rank.count_wrong = 0
        await eventually(lambda: rank.run_to_end == running)


async def test_no_step_is_taken_ahead_where_none_may_be(monkeypatch):
    monkeypatch.setattr(set_maker, "MAX_AHEAD", 0)
    async with cluster() as harness:
        await harness.generate([1, 2, 3], max_tokens=20)
        await harness.until_idle()
        times = (await harness.status()).step_times
        assert times.plans == times.steps == 20
