"""Faults of the coordinator itself while a request is between two sets: they end that request, at the most its sets' epoch."""

import asyncio
from dataclasses import replace

import pytest

from coordinator.kv_mover import KvMover
from coordinator.pd_session import PdSession
from coordinator.pd_work import PdWork
from coordinator.rank_link import RankLink
from coordinator.transfer_stats import TransferStats
from cp_wire import errors
from tests.coordinator.fake_rank import continuation
from tests.coordinator.handover import FINAL, PROMPT
from tests.coordinator.harness import FAST, Harness, cluster, eventually


def faulty(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, times: int = 1) -> list[int]:
    """The method raises as often, then does its work; returns a list with the calls that are still to fail."""
    left, honest = [times], getattr(owner, name)

    def fault(*args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("broken books")
        return honest(*args, **kwargs)

    monkeypatch.setattr(owner, name, fault)
    return left


async def lives_on(harness: Harness, prompt: list[int] = PROMPT) -> None:
    """Nothing is held, and the next request is served as ever."""
    await harness.until_idle()
    failed = asyncio.ensure_future(harness.coordinator.failed())
    try:
        again = await harness.generate(prompt)
        assert again.token_ids == continuation(prompt, 8)
        await harness.until_idle()
        assert not failed.done()
    finally:
        failed.cancel()
        await asyncio.wait([failed])


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(TransferStats, "moved"), (KvMover, "renew")],
    ids=["what a move brought is counted", "the lease is prolonged"],
)
async def test_a_fault_in_background_work_ends_its_request_alone(owner, name, monkeypatch, caplog):
    timings = FAST if name == "moved" else replace(FAST, lease_s=0.06)
    async with cluster(prefill={}, timings=timings) as harness:
        target = harness.ranks[1]
        target.kv.gate.clear()
        other = asyncio.create_task(harness.generate([5] * 9))
        await eventually(lambda: target.kv.writing)
        left = faulty(monkeypatch, owner, name)
        if name == "renew":
            await eventually(lambda: not left[0])
            target.kv.gate.set()
            heard, good = await other, await harness.generate(PROMPT)
        else:
            bad = asyncio.create_task(harness.generate(PROMPT))
            await eventually(lambda: len(target.kv.writing) == 2)
            target.kv.gate.set()
            both = await asyncio.gather(other, bad)
            heard, good = sorted(both, key=lambda each: each.error is None)
        assert isinstance(heard.error, errors.Internal)
        assert heard.error.message == "the request could not be handed over (RuntimeError)"
        assert good.error is None and len(good.token_ids) == 8
        assert said(caplog, "could not be handed over") == 1
        await lives_on(harness)


@pytest.mark.parametrize("call", ["end_pull", "end_lease"])
async def test_an_end_that_could_not_be_asked_for_is_asked_for_again(call, monkeypatch, caplog):
    """Until a rank has said so, its blocks are nobody's."""
    async with cluster(prefill={}) as harness:
        if call == "end_pull":
            harness.ranks[1].kv.failures = [FINAL]
        left = faulty(monkeypatch, RankLink, call)
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await eventually(lambda: not left[0])
        await harness.until_idle()
        assert harness.ranks[1 if call == "end_pull" else 0].kv.ended
        assert said(caplog, "a transfer was not ended") == 1
        await lives_on(harness)


async def test_a_session_that_could_not_be_forgotten_harms_nobody(monkeypatch, caplog):
    async with cluster(prefill={}) as harness:
        source = harness.ranks[0]
        holding = asyncio.create_task(source.hold())
        call = asyncio.create_task(harness.generate([1] * 100))
        await holding
        source.gate.set()
        (session,) = [live.relay for live in harness.home.serving._live.values()]
        await eventually(lambda: session.state.moved and session.state.moving is None)
        left = faulty(monkeypatch, RankLink, "end_pull")
        session.lost(errors.Unavailable("the prompts' side is gone"))
        assert (await call).token_ids == continuation([1] * 100, 8)
        await eventually(lambda: not left[0])
        assert said(caplog, "a transfer was not ended") == 1
        failed = asyncio.ensure_future(harness.coordinator.failed())
        assert (await harness.generate(PROMPT[:9])).token_ids == continuation(PROMPT[:9], 8)
        assert not failed.done()
        failed.cancel()


@pytest.mark.parametrize(("action", "side"), [("arrive", 1), ("end_lease", 0), ("columns", 0)])
async def test_a_fault_of_the_books_in_the_middle_of_a_passage_ends_the_request(action, side, monkeypatch, caplog):
    async with cluster(prefill={}) as harness:
        scheduler = harness.coordinator.sets[side].serving.scheduler
        faulty(monkeypatch, scheduler, action)
        heard = await harness.generate(PROMPT, max_tokens=80)
        if action == "columns":
            # The lease could not be named: a move that failed, for the policy to judge.
            assert heard.token_ids == continuation(PROMPT, 80)
            assert said(caplog, "a move failed") == 1
        else:
            assert isinstance(heard.error, errors.Internal)
            assert said(caplog, "could not be handed over") == 1
        await lives_on(harness)


async def test_an_event_that_cannot_be_ends_the_request(monkeypatch, caplog):
    async with cluster(prefill={}) as harness:
        honest = PdSession.computed

        def twice(session: PdSession, tokens: int) -> None:
            honest(session, tokens)
            monkeypatch.setattr(PdSession, "computed", honest)
            honest(session, tokens - 1)

        monkeypatch.setattr(PdSession, "computed", twice)
        heard = await harness.generate(PROMPT)
        assert heard.error.message == "the request could not be handed over (Impossible)"
        await lives_on(harness)


async def test_books_that_cannot_be_put_right_are_begun_anew(monkeypatch, caplog):
    """The reservation can't be given back: the set that has it starts over, and the coordinator lives."""
    async with cluster(prefill={}) as harness:
        scheduler = harness.home.serving.scheduler
        faulty(monkeypatch, scheduler, "arrive")
        left = faulty(monkeypatch, scheduler, "cancel")
        epochs = [home.epoch for home in harness.coordinator.sets]
        heard = await harness.generate(PROMPT)
        assert isinstance(heard.error, errors.Internal) and not left[0]
        await harness.until(lambda status: status.state == "serving" and harness.home.epoch > epochs[1])
        assert said(caplog, "a request can't be ended") == 1
        await lives_on(harness)


@pytest.mark.parametrize("name", ["stop_move", "end_lease", "end_pulls", "end_leases"])
async def test_a_transfer_whose_end_is_at_fault_is_over_with_the_books_of_its_sets(name, monkeypatch, caplog):
    """Nobody would tell of the end: blocks that wait for it would be nobody's for good, and the lease prolonged for ever."""
    async with cluster(prefill={}) as harness:
        if name in ("stop_move", "end_pulls"):
            harness.ranks[1].kv.failures = [FINAL]
        left = faulty(monkeypatch, PdWork if hasattr(PdWork, name) else KvMover, name)
        epochs = [each.epoch for each in harness.coordinator.sets]
        heard = await harness.generate(PROMPT, max_tokens=80)
        assert isinstance(heard.error, errors.Internal) and not left[0]
        await eventually(
            lambda: all(each.epoch > was and each.ready for each, was in zip(harness.coordinator.sets, epochs, strict=True))
        )
        assert said(caplog, "a request can't be ended") == 1
        assert not any(each.serving.load for each in harness.coordinator.sets)
        await lives_on(harness)
