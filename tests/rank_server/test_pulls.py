"""Pulls of one session never run at once, and none begins after its session's end."""

import asyncio

import pytest

from cp_wire.errors import Stale
from kv_transfer.pull import Report
from rank_server import pulls as module
from rank_server.pulls import Pulls

DEADLINE_S = 10.0


class Work:
    """A pull that runs until told, and takes its time to stop."""

    def __init__(self):
        self.events = []
        self.begun = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self):
        self.events.append("begins")
        self.begun.set()
        try:
            await self.go.wait()
            self.events.append("is done")
        except asyncio.CancelledError:
            for _ in range(5):
                await asyncio.sleep(0)
            self.events.append("has stopped")
            raise
        return Report(messages=3)


async def started(pulls, session, attempt):
    work = Work()
    call = asyncio.create_task(pulls.run(session, attempt, work))
    await asyncio.wait_for(work.begun.wait(), DEADLINE_S)
    return work, call


async def test_sessions_run_beside_one_another():
    pulls = Pulls()
    one, first = await started(pulls, 1, 1)
    other, second = await started(pulls, 2, 1)
    one.go.set()
    other.go.set()
    assert (await first).messages == (await second).messages == 3
    assert pulls.sessions == 2
    await pulls.end_all()
    assert pulls.sessions == 0


async def test_what_a_pull_raises_is_raised_and_a_newer_attempt_may_follow():
    async def fails():
        raise ValueError("so it goes")

    pulls = Pulls()
    with pytest.raises(ValueError, match="so it goes"):
        await pulls.run(1, 1, fails)
    work, call = await started(pulls, 1, 2)
    work.go.set()
    assert (await call).messages == 3


async def test_a_newer_attempt_waits_until_the_older_one_has_stopped():
    pulls = Pulls()
    old, replaced = await started(pulls, 1, 1)
    new, call = await started(pulls, 1, 2)
    assert old.events == ["begins", "has stopped"]
    with pytest.raises(Stale, match="attempt 1 of transfer 1 was stopped"):
        await replaced
    for attempt in (1, 2):
        with pytest.raises(Stale, match="comes after attempt 2"):
            await asyncio.wait_for(pulls.run(1, attempt, Work()), DEADLINE_S)
    new.go.set()
    assert (await call).messages == 3


async def test_of_attempts_that_wait_only_the_newest_begins():
    pulls = Pulls()
    _, first = await started(pulls, 1, 1)
    passed_over = Work()
    second = asyncio.create_task(pulls.run(1, 2, passed_over))
    await asyncio.sleep(0)
    last, third = await started(pulls, 1, 3)
    with pytest.raises(Stale, match="was stopped before it began"):
        await second
    assert passed_over.events == []
    last.go.set()
    assert (await third).messages == 3
    with pytest.raises(Stale):
        await first


async def test_end_waits_and_is_final():
    pulls = Pulls()
    work, call = await started(pulls, 1, 1)
    await pulls.end(1)
    assert work.events == ["begins", "has stopped"]
    with pytest.raises(Stale):
        await call
    await pulls.end(1)
    with pytest.raises(Stale, match="transfer 1 is over"):
        await asyncio.wait_for(pulls.run(1, 2, Work()), DEADLINE_S)
    assert pulls.sessions == 0


async def test_an_end_that_comes_first_is_final_too():
    pulls = Pulls()
    await pulls.end(4)
    with pytest.raises(Stale, match="transfer 4 is over"):
        await asyncio.wait_for(pulls.run(4, 1, Work()), DEADLINE_S)


async def test_a_cancelled_call_is_done_when_its_pull_is():
    pulls = Pulls()
    work, call = await started(pulls, 1, 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert work.events == ["begins", "has stopped"]


async def test_ended_sessions_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 2)
    pulls = Pulls()
    for session in (1, 2, 3):
        await pulls.end(session)
    work, call = await started(pulls, 1, 1)
    work.go.set()
    await call
    with pytest.raises(Stale):
        await asyncio.wait_for(pulls.run(2, 1, Work()), DEADLINE_S)
