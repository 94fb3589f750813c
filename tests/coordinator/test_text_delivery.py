"""What happens when text is late, fails, or can't be delivered: every request still ends, and nothing is held without bound."""

import asyncio
import contextlib
import threading
from dataclasses import replace

import pytest

from coordinator import engine, set_maker, text_worker
from coordinator.text_rows import to_text
from coordinator.text_worker import TextWorker
from cp_wire import errors
from cp_wire.pb import coordinator_pb2
from tests.coordinator.fake_rank import continuation
from tests.coordinator.harness import FAST, FakeText, cluster, eventually, letters, listen

STOPPING = {"max_tokens": 20, "stop": [letters(continuation([1], 3))[2]]}
"""A request of the prompt [1] whose text ends it with its third token or earlier."""


@contextlib.contextmanager
def blocked(monkeypatch, owner, name, function):
    """The text thread waits in a function until the block ends."""
    release = threading.Event()

    def wait(*args):
        assert release.wait(30)
        return function(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wait)
        try:
            yield release
        finally:
            release.set()


def failing(function, times):
    """The function, once it has failed so often."""
    left = [times]

    def call(*args):
        if left[0]:
            left[0] -= 1
            raise OSError("/srv/secret")
        return function(*args)

    return call


async def two_in_one_step(harness):
    held = asyncio.create_task(harness.ranks[0].hold())
    first = asyncio.create_task(harness.generate([9], max_tokens=2))
    await held
    twins = [asyncio.create_task(harness.generate([1], **STOPPING)) for _ in range(2)]
    await harness.until_active(3)
    await eventually(lambda: harness.scheduler.waiting == 2)
    harness.ranks[0].gate.set()
    await first
    return [await twin for twin in twins]


async def test_fault_in_one_delivery_ends_one_request(monkeypatch):
    async with cluster() as harness:
        with monkeypatch.context() as patch:
            patch.setattr(harness.scheduler, "finish", failing(harness.scheduler.finish, 1))
            broken, whole = await two_in_one_step(harness)
        assert isinstance(broken.error, errors.Internal)
        assert broken.error.message == "the output could not be delivered (OSError)"
        assert whole.finished.finish_reason == "stop"
        assert (await harness.status()).state == "serving" and harness.home.epoch == 1
        await harness.until_idle()


async def test_request_that_cannot_be_ended_breaks_the_set(monkeypatch):
    async with cluster() as harness:
        with monkeypatch.context() as patch:
            patch.setattr(harness.scheduler, "finish", failing(harness.scheduler.finish, 2))
            broken, other = await two_in_one_step(harness)
            assert isinstance(broken.error, errors.Internal) and other.finished.finish_reason == "stop"
            await eventually(lambda: harness.home.epoch == 2 and harness.home.ready)
        assert (await harness.generate([7])).token_ids == continuation([7], 8)
        await harness.until_idle()


async def test_fault_of_the_text_thread_ends_the_requests_of_its_step(monkeypatch):
    async with cluster() as harness:
        with monkeypatch.context() as patch:
            patch.setattr(text_worker, "to_text", failing(to_text, 1))
            heard = await asyncio.gather(harness.generate([1], max_tokens=1), harness.generate([2], max_tokens=1))
            lost = [one.error for one in heard if one.error is not None]
            assert lost and {error.message for error in lost} == {"the output could not be delivered (OSError)"}
        assert (await harness.generate([7])).token_ids == continuation([7], 8)
        await harness.until_idle()


async def test_stuck_text_thread_breaks_the_set_also_when_nothing_else_is_to_be_done(monkeypatch):
    async with cluster(timings=replace(FAST, text_s=0.2)) as harness:
        with blocked(monkeypatch, text_worker, "to_text", to_text):
            heard = await harness.generate([1], max_tokens=3)
            assert isinstance(heard.error, errors.Internal)
            assert heard.error.message == "the text thread has finished nothing for 0.2 s"
            await eventually(lambda: harness.home.epoch == 2 and harness.home.ready)
        assert (await harness.generate([7])).token_ids == continuation([7], 8)
        await harness.until_idle()


async def one_done_one_computed(harness):
    """Calls of a request whose last text is with the text thread, and of one whose step the rank does not end."""
    rank = harness.ranks[0]
    held = asyncio.create_task(rank.hold())
    done = asyncio.create_task(harness.generate([1], max_tokens=1))
    await held
    computed = asyncio.create_task(harness.generate([2], max_tokens=8))
    await harness.until_queued(2)
    rank.gate.set()
    await rank.hold()
    return done, computed


async def test_stuck_text_thread_is_noticed_while_a_step_is_under_way(monkeypatch):
    async with cluster(timings=replace(FAST, text_s=0.2)) as harness:
        with blocked(monkeypatch, text_worker, "to_text", to_text):
            for heard in await asyncio.gather(*await one_done_one_computed(harness)):
                assert isinstance(heard.error, errors.Internal)
                assert heard.error.message == "the text thread has finished nothing for 0.2 s"
            assert not harness.ranks[0].gate.is_set() and harness.home.epoch == 1
            harness.ranks[0].gate.set()
            await eventually(lambda: harness.home.epoch == 2 and harness.home.ready)
        assert (await harness.generate([7])).token_ids == continuation([7], 8)
        await harness.until_idle()


async def test_stuck_text_thread_is_noticed_while_the_set_is_broken(monkeypatch):
    async with cluster(timings=replace(FAST, text_s=0.5)) as harness:
        with blocked(monkeypatch, text_worker, "to_text", to_text):
            done, computed = await one_done_one_computed(harness)
            await harness.ranks[0].die()
            assert isinstance((await computed).error, errors.Unavailable)
            assert (await done).error.message == "the text thread has finished nothing for 0.5 s"
            assert not harness.home.ready
        await harness.replace(0)
        await eventually(lambda: harness.home.ready)
        assert (await harness.generate([7])).token_ids == continuation([7], 8)
        assert harness.home.epoch == 2
        await harness.until_idle()


async def test_engine_runs_no_further_ahead_of_the_text_than_its_bound(monkeypatch):
    monkeypatch.setattr(engine, "MAX_TEXT_BACKLOG", 4)
    monkeypatch.setattr(set_maker, "MAX_AHEAD", 0)
    async with cluster(timings=replace(FAST, text_s=0.2)) as harness:
        with blocked(monkeypatch, text_worker, "to_text", to_text):
            heard = await harness.generate([1], max_tokens=50)
            assert isinstance(heard.error, errors.Internal)
            # One more is computed while the last plan's text waits to be handed over.
            assert len(harness.ranks[0].steps) <= 4 + 2


async def test_engine_goes_on_when_late_text_has_come(monkeypatch):
    monkeypatch.setattr(engine, "MAX_TEXT_BACKLOG", 4)
    async with cluster() as harness:
        with blocked(monkeypatch, text_worker, "to_text", to_text) as release:
            task = asyncio.create_task(harness.generate([1], max_tokens=50))
            await eventually(lambda: len(harness.ranks[0].steps) >= 4)
            release.set()
            assert (await task).token_ids == continuation([1], 50)
        await harness.until_idle()


async def test_prompt_that_is_not_tokenised_in_time_is_told_so(monkeypatch):
    async with cluster(timings=replace(FAST, encode_s=0.1)) as harness:
        with blocked(monkeypatch, FakeText, "encode", FakeText.encode):
            request = coordinator_pb2.GenerateRequest(text="ab", max_tokens=2)
            heard = await listen(harness.inference.Generate(request, timeout=10))
            assert isinstance(heard.error, errors.DeadlineExceeded) and heard.error.retryable
            assert heard.error.message == "the prompt was not tokenised within 0.1 s"
            await harness.until_active(0)
        assert (await harness.generate([7])).token_ids == continuation([7], 8)


async def test_future_of_a_step_carries_the_fault_of_either_side(monkeypatch):
    worker = TextWorker(FakeText(), encode_s=1.0)

    def refuse(results):
        raise KeyError("deliver")

    with pytest.raises(KeyError, match="deliver"):
        await worker.submit([], refuse)
    monkeypatch.setattr(text_worker, "to_text", failing(to_text, 1))
    with pytest.raises(OSError, match="secret"):
        await worker.submit([], lambda results: None)
    assert await worker.submit([], lambda results: None) is None
    worker.close()
