"""Ranks that are lost, frozen or deaf while a request is between two sides: nothing is held for them."""

import asyncio
from dataclasses import replace

import pytest

from coordinator.app import Options
from coordinator.passage import Phase
from cp_wire import errors
from tests.coordinator.fake_rank import continuation
from tests.coordinator.handover import FAIL, FINAL, ONE, PROMPT, causes
from tests.coordinator.harness import FAST, cluster, eventually


@pytest.mark.parametrize("policy", [Options(), FAIL], ids=["recompute", "fail"])
@pytest.mark.parametrize("moment", ["prefill", "moving"])
async def test_h19_a_lost_prefill_rank(moment, policy):
    async with cluster(prefill={"pcp": 2, "dcp": 2}, options=policy) as harness:
        source, target = harness.ranks[0], harness.ranks[2]
        if moment == "prefill":
            holding = asyncio.create_task(source.hold())
            call = asyncio.create_task(harness.generate(PROMPT))
            await holding
        else:
            target.kv.gate.clear()
            call = asyncio.create_task(harness.generate(PROMPT))
            await eventually(lambda: target.kv.writing and len(source.steps) >= 3)
        await harness.ranks[1].die()
        heard = await call
        source.gate.set()
        target.kv.gate.set()
        status = await harness.status()
        if policy is FAIL:
            assert isinstance(heard.error, errors.Unavailable) and heard.error.retryable
            assert "rank 1" in heard.error.message or "UNAVAILABLE" in heard.error.message
            assert sum(causes(status.transfers.failed).values()) == 1
        else:
            assert heard.token_ids == continuation(PROMPT, 8)
            assert sum(causes(status.transfers.recomputed).values()) == 1
        await harness.replace(1)
        await harness.until(lambda status: status.state == "serving")
        again = await harness.generate(PROMPT)
        assert again.token_ids == continuation(PROMPT, 8) and again.finished.route.reason == "prefill and decode apart"
        await harness.until_idle()


async def test_a_prefill_rank_that_is_lost_between_moves_leaves_no_session_on_the_writers():
    async with cluster(prefill={}) as harness:
        source, target = harness.ranks
        pulled = asyncio.create_task(target.kv.hold())
        call = asyncio.create_task(harness.generate([1] * 100))
        await asyncio.sleep(0)  # `hold` has begun
        at_gate, reached = target.kv.at_gate, target.kv.at_gate.set

        def reached_while_the_prompt_is_under_way() -> None:
            source.gate.clear()
            reached()

        at_gate.set = reached_while_the_prompt_is_under_way  # type: ignore[method-assign]
        await pulled
        await asyncio.wait_for(source.at_gate.wait(), 5)
        target.kv.gate.set()
        (session,) = [live.relay for live in harness.home.serving._live.values()]
        await eventually(lambda: session.state.moved and session.state.moving is None)
        assert session.state.phase is Phase.PREFILL
        await source.die()
        assert (await call).token_ids == continuation([1] * 100, 8)
        await eventually(lambda: target.kv.attempts.keys() <= target.kv.ended)


async def test_a_lost_prefill_rank_and_a_writer_that_is_late_to_stop_harm_nobody_else():
    """The request goes on holding its reservation, and its lease would be prolonged, when its prompt's set has forgotten it."""
    async with cluster(prefill={}, timings=replace(FAST, lease_s=0.15)) as harness:
        source, target = harness.ranks
        end_pull, go, prolonged = target.kv.end_pull, asyncio.Event(), asyncio.Event()

        async def late(request):
            await go.wait()
            return await end_pull(request)

        pulled = asyncio.create_task(target.kv.hold())
        call = asyncio.create_task(harness.generate(PROMPT))
        await pulled
        (session,) = [live.relay for live in harness.home.serving._live.values()]
        target.kv.end_pull = late
        await source.die()
        await eventually(lambda: harness.coordinator.sets[0].epoch > 1)
        renew = session._work.mover.renew

        async def seen() -> None:
            await renew()
            prolonged.set()

        session._work.mover.renew = seen
        failed = asyncio.create_task(harness.coordinator.failed())
        await asyncio.wait({failed, asyncio.create_task(prolonged.wait())}, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert prolonged.is_set() and not failed.done()
        failed.cancel()
        go.set()
        assert (await call).token_ids == continuation(PROMPT, 8)


@pytest.mark.parametrize("moment", ["prefill", "moving", "decode"])
async def test_a_lost_decode_rank_ends_its_requests_and_the_prompts_side_keeps_nothing(moment):
    async with cluster(prefill=ONE, pcp=2, dcp=2) as harness:
        source, target = harness.ranks[0], harness.ranks[1]
        if moment == "prefill":
            holding = asyncio.create_task(source.hold())
        elif moment == "moving":
            target.kv.gate.clear()
        call = asyncio.create_task(harness.generate(PROMPT, max_tokens=80))
        if moment == "prefill":
            await holding
        elif moment == "moving":
            await eventually(lambda: target.kv.writing)
        else:
            await eventually(lambda: len(target.steps) > 2)
        await harness.ranks[2].die()
        heard = await call
        assert isinstance(heard.error, errors.Unavailable) and heard.error.retryable and "rank 2" in heard.error.message
        source.gate.set()
        await harness.replace(2)
        await harness.until(lambda status: status.state == "serving")
        target.kv.gate.set()
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await harness.until_idle()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_h4_a_frozen_rank_in_the_middle_of_a_move_keeps_no_block_from_the_others(side):
    async with cluster(prefill={"pcp": 2, "dcp": 2}, timings=replace(FAST, poll_deadline_s=0.3, beside_s=0.2)) as harness:
        target = harness.ranks[2]
        target.kv.gate.clear()
        call = asyncio.create_task(harness.generate(PROMPT))
        await eventually(lambda: target.kv.writing and len(harness.ranks[0].steps) >= 3)
        victim = harness.ranks[1 if side == "prefill" else 2]
        victim.frozen = True
        await harness.until(lambda status: status.state == "degraded")
        if side == "prefill":
            target.kv.gate.set()
            assert (await call).token_ids == continuation(PROMPT, 8)
        else:
            assert "rank 2" in (await call).error.message
        await victim.die()
        await harness.replace(victim.rank)
        await harness.until(lambda status: status.state == "serving")
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await harness.until_idle()


async def test_a_lease_that_cannot_be_ended_is_over_once_its_rank_is_lost():
    async with cluster(prefill={}) as harness:
        source = harness.ranks[0]
        asked = asyncio.Event()

        async def never(request):
            asked.set()
            await asyncio.Event().wait()

        source.kv.end_lease = never
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await asyncio.wait_for(asked.wait(), 5)
        await source.die()
        await harness.replace(0)
        await harness.until(lambda status: status.state == "serving")
        await harness.until_idle()


@pytest.mark.parametrize("call", ["end_pull", "end_lease"])
async def test_a_rank_that_never_ends_a_transfer_is_fenced(call):
    """It answers everything else."""
    async with cluster(prefill={}, timings=replace(FAST, pull_s=0.3, beside_s=0.1)) as harness:
        rank = harness.ranks[0 if call == "end_lease" else 1]
        rank.kv.failures = [FINAL] if call == "end_pull" else []

        async def never(request):
            await asyncio.Event().wait()

        setattr(rank.kv, call, never)
        heard = await harness.generate(PROMPT)
        if call == "end_pull":
            assert "rank 1: it has not ended a transfer for 0.3 s" in heard.error.message
        else:
            assert heard.token_ids == continuation(PROMPT, 8)
        status = await harness.until(lambda status: status.state == "degraded")
        assert status.ranks[rank.rank].state == "lost"
        await rank.die()
        await harness.replace(rank.rank)
        await harness.until(lambda status: status.state == "serving")
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await harness.until_idle()
