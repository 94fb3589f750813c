"""Ranks that die, freeze, hang or fail: what the clients see, what the status says, how the cluster comes back."""

import asyncio
import re
import threading
import time
from dataclasses import replace

import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from coordinator.rank_set import MAX_OPENINGS
from cp_wire import errors
from cp_wire.pb import coordinator_pb2, rank_pb2
from tests.coordinator.fake_rank import FakeRank, continuation
from tests.coordinator.harness import FAST, FakeText, cluster, eventually, listen

NOBODY_LOST = replace(FAST, cause_s=0.01)
"""For failed collectives that no lost rank explains."""


def seat(status, rank):
    return next(one for one in status.ranks if one.rank == rank)


async def in_decode(harness, **fields):
    """A request that has streamed at least one token; the task returns what it heard."""
    task = asyncio.create_task(harness.generate([1, 2, 3], **({"max_tokens": 100} | fields)))
    await eventually(lambda: len(harness.ranks[0].steps) > 2)
    return task


async def assert_lost(task):
    heard = await task
    assert isinstance(heard.error, errors.Unavailable) and heard.error.retryable
    assert heard.error.retry_after_s is not None and "rank 1" in heard.error.message
    assert heard.token_ids == continuation([1, 2, 3], 100)[: len(heard.token_ids)]


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_k8_l1_lost_rank_ends_requests_and_comes_back(how):
    async with cluster(pcp=2, dcp=2) as harness:
        victim = harness.ranks[1]
        task = await in_decode(harness)
        queued = asyncio.create_task(harness.generate([1, 2, 3], max_tokens=100))
        await eventually(lambda: harness.home.engine.load == 2)
        started = time.monotonic()
        if how == "killed":
            await victim.die()
        else:
            victim.frozen = True
            victim.gate.clear()
        await assert_lost(task)
        await assert_lost(queued)
        assert time.monotonic() - started < (2 if how == "killed" else 5)
        status = await harness.status()
        assert status.state == "degraded"
        assert seat(status, 1).state == "lost" and seat(status, 1).fenced_reason
        assert isinstance((await harness.generate([5])).error, errors.Unavailable)
        victim.gate.set()
        await asyncio.wait_for(victim.lane_closed.wait(), 5)
        await victim.die()
        fresh = await harness.replace(1)
        status = await harness.until(lambda status: status.state == "serving")
        assert seat(status, 1).instance == fresh.instance != victim.instance
        assert seat(status, 1).fenced_reason == ""
        assert all(group.epoch > 1 for group in status.groups)
        again = await harness.generate([1, 2, 3], max_tokens=20)
        assert again.token_ids == continuation([1, 2, 3], 20)
        assert again.finished.cached_tokens == 0, "the prefix cache of the old epoch is gone"
        assert set(fresh.step_epochs) == {harness.home.epoch}
        await harness.until_idle()


async def test_l1_health_follows_the_sets():
    async with cluster(ranks=[], wait=False) as harness:
        assert await harness.health() == HealthCheckResponse.NOT_SERVING
        harness.ranks.append(FakeRank(0))
        await harness.ranks[0].start(harness.address)
        await harness.until(lambda status: status.state == "serving")
        assert await harness.health() == HealthCheckResponse.SERVING
        await harness.ranks[0].die()
        await harness.until(lambda status: status.state == "degraded")
        assert await harness.health() == HealthCheckResponse.NOT_SERVING
        await harness.replace(0)
        await harness.until(lambda status: status.state == "serving")
        assert await harness.health() == HealthCheckResponse.SERVING
        await harness.coordinator.drain(1)
        assert await harness.health() == HealthCheckResponse.NOT_SERVING


async def test_survivor_gets_reset_and_new_groups_not_new_weights():
    async with cluster(pcp=2, dcp=2) as harness:
        await harness.ranks[1].die()
        await harness.until(lambda status: status.state == "degraded")
        survivor = harness.ranks[0]
        before = len(survivor.commands)
        await harness.replace(1)
        await harness.until(lambda status: status.state == "serving")
        assert survivor.commands[before:] == ["reset", "prepare_group", "open_group"]


async def test_newcomer_is_told_the_pool_that_the_set_has():
    async with cluster(pcp=2, dcp=2) as harness:
        assert harness.ranks[1].config.kv_cache_tokens_per_rank == 0
        await harness.ranks[1].die()
        await harness.until(lambda status: status.state == "degraded")
        fresh = await harness.replace(1)
        await harness.until(lambda status: status.state == "serving")
        assert fresh.config.kv_cache_tokens_per_rank == 64 * 4


async def test_l1_worker_without_progress_is_lost():
    timings = replace(FAST, stall_floor_s=0.2, step_floor_s=60.0)
    async with cluster(timings=timings) as harness:
        harness.ranks[0].gate.clear()
        heard = await harness.generate([1, 2, 3])
        assert isinstance(heard.error, errors.Unavailable)
        assert re.search(r"rank 0: no progress for \d\.\d s, the limit is 0\.2 s", heard.error.message)


async def test_l1_lost_rank_is_named_and_not_the_survivor_that_noticed():
    async with cluster(pcp=2, dcp=2, timings=replace(FAST, cause_s=5.0)) as harness:
        survivor, victim = harness.ranks
        task = await in_decode(harness)
        await victim.hold()
        victim.room.leave(1)
        await eventually(lambda: not harness.home.ready)
        assert not survivor.lane_closed.is_set() and not task.done()
        await victim.die()
        heard = await task
        assert re.fullmatch(r"the request was lost: rank 1: (its lane|it does not answer) .*", heard.error.message)


@pytest.mark.parametrize("command", ["step", "open_group"])
async def test_l6_what_a_rank_says_reaches_operators_and_no_client(command):
    secret = "RuntimeError: /srv/models/x [10.0.0.7]:4242"
    error = rank_pb2.CommandError(reason="INTERNAL", message=secret)
    async with cluster(pcp=2, dcp=2) as harness:
        victim = harness.ranks[0]
        victim.fail_command = ("step", error)
        heard = await harness.generate([1])
        assert heard.error.message == "the request was lost: rank 0: INTERNAL in step"
        await harness.until(lambda status: status.state == "serving")
        if command == "open_group":
            victim.fail_always = ("open_group", error)
            victim.fail_command = ("step", error)
            await harness.generate([1])
            status = await harness.until(lambda status: seat(status, 0).state == "lost")
            assert secret in seat(status, 0).fenced_reason
            assert isinstance((await harness.generate([1])).error, errors.Unavailable)
            assert secret not in (await harness.generate([1])).error.message


async def test_reason_that_is_no_word_is_not_repeated():
    async with cluster() as harness:
        harness.ranks[0].fail_command = ("step", rank_pb2.CommandError(reason="at 10.0.0.7:4242", message="x"))
        assert (await harness.generate([1])).error.message == "the request was lost: rank 0: INTERNAL in step"


async def test_fault_of_the_coordinator_itself_is_named_by_its_type_alone(monkeypatch):
    async with cluster() as harness:
        with monkeypatch.context() as patch:
            patch.setattr(harness.scheduler, "commit", lambda *_, **__: (_ for _ in ()).throw(OSError("/srv/secret")))
            heard = await harness.generate([1])
        assert heard.error.message == "the request was lost: internal error (OSError)"
        await harness.until(lambda status: status.state == "serving")
        assert (await harness.generate([7])).token_ids == continuation([7], 8)


async def test_survivor_that_waits_for_a_lost_member_is_not_lost_too():
    """Its collective can't be interrupted: it ends at the step's bound, long after a worker counts as stuck."""
    timings = replace(FAST, poll_deadline_s=0.2, stall_floor_s=0.5, step_floor_s=1.2)
    async with cluster(pcp=2, dcp=2, timings=timings) as harness:
        survivor, victim = harness.ranks
        task = await in_decode(harness)
        victim.frozen = True
        await victim.hold()
        await assert_lost(task)
        await harness.replace(1)
        await harness.until(lambda status: status.state == "serving")
        assert survivor.commands.count("configure") == 1 and not survivor.lane_closed.is_set()
        assert survivor.commands[-3:] == ["reset", "prepare_group", "open_group"]
        await victim.die()


async def test_rank_that_never_opens_its_groups_is_fenced():
    async with cluster(pcp=2, dcp=2, timings=NOBODY_LOST) as harness:
        error = rank_pb2.CommandError(reason="COLLECTIVE_FAILED", message="no connection")
        victim = harness.ranks[1]
        victim.fail_always, victim.fail_command = ("open_group", error), ("step", error)
        before = victim.commands.count("open_group")
        assert (await harness.generate([1])).error is not None
        await harness.until(lambda status: seat(status, 1).state == "lost")
        assert victim.commands.count("open_group") - before == MAX_OPENINGS
        await victim.die()
        await harness.replace(1)
        await harness.until(lambda status: status.state == "serving")
        assert (await harness.generate([7])).token_ids == continuation([7], 8)


async def test_h15_stale_process_cannot_take_a_filled_seat():
    async with cluster() as harness:
        second = FakeRank(0)
        with pytest.raises(errors.Duplicate):
            await second.start(harness.address)
        await second.die()
        assert (await harness.generate([1])).error is None


async def test_h19_step_error_ends_requests_with_its_cause_and_serves_again_at_once():
    async with cluster(pcp=2, dcp=2, timings=NOBODY_LOST) as harness:
        started = time.monotonic()
        harness.ranks[1].fail_command = ("step", rank_pb2.CommandError(reason="COLLECTIVE_FAILED", message="dcp:0 timed out"))
        heard = await harness.generate(list(range(40)), max_tokens=5)
        assert time.monotonic() - started < 1
        assert isinstance(heard.error, errors.Unavailable)
        assert heard.error.message == "the request was lost: rank 1: COLLECTIVE_FAILED in step"
        await harness.until(lambda status: status.state == "serving")
        assert all(rank.commands.count("configure") == 1 for rank in harness.ranks), "nobody was replaced"
        assert (await harness.generate([7])).token_ids == continuation([7], 8)
        await harness.until_idle()


async def test_groups_that_do_not_open_are_tried_again():
    async with cluster(pcp=2, dcp=2, timings=NOBODY_LOST) as harness:
        error = rank_pb2.CommandError(reason="COLLECTIVE_FAILED", message="no connection")
        harness.ranks[0].fail_command = ("step", error)
        assert (await harness.generate([1])).error is not None
        harness.ranks[0].fail_command = ("open_group", error)
        await harness.until(lambda status: status.state == "serving" and harness.ranks[0].fail_command is None)
        assert (await harness.generate([7])).token_ids == continuation([7], 8)


async def test_other_set_keeps_serving():
    async with cluster(dp=2) as harness:
        await harness.ranks[1].die()
        status = await harness.until(lambda status: seat(status, 1).state == "lost")
        assert status.state == "degraded" and seat(status, 0).state == "ready"
        heard = await asyncio.gather(*(harness.generate([index]) for index in range(4)))
        assert all(list(one.finished.route.ranks) == [0] for one in heard)
        await harness.replace(1)
        await harness.until(lambda status: status.state == "serving")
        heard = await asyncio.gather(*(harness.generate([index]) for index in range(4)))
        assert {tuple(one.finished.route.ranks) for one in heard} == {(0,), (1,)}


async def test_requests_whose_prompt_is_being_prepared_count_for_their_set(monkeypatch):
    release = threading.Event()
    async with cluster(dp=2) as harness:
        encode = FakeText.encode
        monkeypatch.setattr(FakeText, "encode", lambda text, prompt: release.wait(10) and encode(text, prompt))
        request = coordinator_pb2.GenerateRequest(text="ab", max_tokens=2)
        calls = [asyncio.create_task(listen(harness.inference.Generate(request, timeout=10))) for _ in range(4)]
        await harness.until_active(4)
        release.set()
        heard = await asyncio.gather(*calls)
        assert sorted(one.finished.route.ranks[0] for one in heard) == [0, 0, 1, 1]


async def test_a_long_prompt_keeps_no_short_one_waiting(monkeypatch):
    release = threading.Event()
    async with cluster() as harness:
        encode = FakeText.encode
        monkeypatch.setattr(
            FakeText, "encode", lambda text, prompt: (len(prompt) < 9 or release.wait(10)) and encode(text, prompt)
        )
        message = coordinator_pb2.ChatMessage(role="a", content="b")
        chat = coordinator_pb2.ChatPrompt(messages=[message] * 65)
        long = asyncio.create_task(
            listen(harness.inference.Generate(coordinator_pb2.GenerateRequest(chat=chat, max_tokens=1), timeout=20))
        )
        await harness.until_active(1)
        short = await listen(harness.inference.Generate(coordinator_pb2.GenerateRequest(text="ab", max_tokens=1), timeout=10))
        assert short.finished.finish_reason == "length"
        assert not long.done()
        release.set()
        assert (await long).error is None or isinstance((await long).error, errors.InvalidRequest)


async def test_step_without_an_answer_is_noticed_by_its_deadline():
    """The rank's event loop answers and claims progress; only the deadline of the step can tell."""
    timings = replace(FAST, stall_floor_s=60.0, step_floor_s=0.2, step_margin_s=0.1)
    async with cluster(timings=timings) as harness:
        harness.ranks[0].gate.clear()
        heard = await harness.generate([1])
        assert isinstance(heard.error, errors.Unavailable) and "no result of a step" in heard.error.message
        status = await harness.until(lambda status: seat(status, 0).state == "lost")
        assert "no result of a step" in seat(status, 0).fenced_reason


async def test_i6_block_tables_that_differ_end_the_epoch():
    async with cluster() as harness:
        task = await in_decode(harness)
        harness.ranks[0].count_wrong = True
        heard = await task
        assert isinstance(heard.error, errors.Unavailable) and "block tables" in heard.error.message
        harness.ranks[0].count_wrong = False
        await harness.until(lambda status: status.state == "serving")
        assert (await harness.generate([7])).token_ids == continuation([7], 8)
