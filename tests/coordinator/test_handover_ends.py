"""Requests that end while they are between two sides, by their client or by a fault of their own: they end alone, on both."""

import asyncio
from dataclasses import replace

import pytest

from coordinator import text_worker
from coordinator.text_rows import to_text
from cp_wire import errors
from tests.coordinator.fake_rank import continuation
from tests.coordinator.handover import PROMPT
from tests.coordinator.harness import FAST, cluster, eventually, listen
from tests.coordinator.test_text_delivery import blocked


@pytest.mark.parametrize("moment", ["queued", "prefill", "moving", "first token", "decode"])
async def test_h4_h6_a_client_that_leaves_in_any_state_leaves_nothing(moment):
    async with cluster(prefill={"pcp": 2, "dcp": 2}, max_num_seqs=1) as harness:
        source, target = harness.ranks[0], harness.ranks[2]
        stays = None
        if moment == "queued":
            target.kv.gate.clear()
            stays = asyncio.create_task(harness.generate([9] * 9))
            await eventually(lambda: target.kv.pulls)
        holding = None
        if moment == "prefill":
            holding = asyncio.create_task(source.hold())
        elif moment in ("moving", "first token"):
            target.kv.gate.clear()
        call = harness.call(PROMPT, max_tokens=80)
        task = asyncio.create_task(listen(call))
        if holding is not None:
            await holding
        await eventually(
            {
                "queued": lambda: harness.coordinator.handover.waiting == 1,
                "prefill": lambda: True,
                "moving": lambda: target.kv.writing,
                "first token": lambda: len(source.steps) >= 3 and target.kv.writing,
                "decode": lambda: len(target.steps) > 2,
            }[moment]
        )
        call.cancel()
        await asyncio.gather(task, return_exceptions=True)
        source.gate.set()
        if stays is None:
            await harness.until_idle()
        target.kv.gate.set()
        if stays is not None:
            assert (await stays).token_ids == continuation([9] * 9, 8)
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await harness.until_idle()


async def test_h4_fifty_clients_leave_while_the_prompts_side_is_lost():
    async with cluster(prefill={}, max_num_seqs=8) as harness:
        target = harness.ranks[1]
        target.kv.gate.clear()
        calls = [harness.call([*PROMPT, number]) for number in range(50)]
        tasks = [asyncio.create_task(listen(call)) for call in calls]
        await harness.until_active(50)
        await eventually(lambda: target.kv.writing)
        await harness.ranks[0].die()
        for call in calls:
            call.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        target.kv.gate.set()
        await harness.replace(0)
        await harness.until(lambda status: status.state == "serving")
        await harness.until_idle()
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await harness.until_idle()


async def test_h19_a_row_that_fails_on_the_prompts_side_ends_its_request_alone():
    async with cluster(prefill={}) as harness:
        source = harness.ranks[0]
        source.fail_rows[1] = "logits are not finite"
        bad = asyncio.create_task(harness.generate(PROMPT))
        await harness.until_active(1)
        await eventually(lambda: harness.coordinator.handover.waiting or source.steps)
        good = await harness.generate(PROMPT[:7])
        assert good.token_ids == continuation(PROMPT[:7], 8)
        error = (await bad).error
        assert isinstance(error, errors.Internal) and error.message == "logits are not finite"
        await harness.until_idle()


@pytest.mark.parametrize("where", ["reserve", "end", "pick_source"])
async def test_a_fault_at_the_hand_over_ends_one_request_alone(where, monkeypatch):
    async with cluster(prefill={}, max_num_seqs=1) as harness:
        target = harness.ranks[1]
        target.kv.gate.clear()
        first = asyncio.create_task(harness.generate(PROMPT))
        await eventually(lambda: target.kv.writing)
        others = []
        for count in (1, 2):
            others.append(asyncio.create_task(harness.generate([5] * 9)))
            await eventually(lambda count=count: harness.coordinator.handover.waiting == count)
        owner = harness.home.serving.scheduler if where == "reserve" else harness.coordinator.handover
        honest, second = getattr(owner, where), min(harness.coordinator.handover._queues[harness.home])

        def fault(*args):
            if where == "pick_source" or args[-1].handle == second:
                monkeypatch.setattr(owner, where, honest)
                raise RuntimeError("broken books")
            return honest(*args)

        monkeypatch.setattr(owner, where, fault)
        target.kv.gate.set()
        assert (await first).token_ids == continuation(PROMPT, 8)
        assert (await others[0]).error.message == "the request could not be handed over (RuntimeError)"
        assert (await others[1]).token_ids == continuation([5] * 9, 8)
        await harness.until_idle()


async def test_text_that_is_stuck_ends_the_request_on_both_sides(monkeypatch):
    async with cluster(prefill={}, timings=replace(FAST, text_s=0.2)) as harness:
        harness.ranks[1].kv.gate.clear()
        with blocked(monkeypatch, text_worker, "to_text", to_text):
            heard = await harness.generate(PROMPT)
            assert heard.error.message == "the text thread has finished nothing for 0.2 s"
        harness.ranks[1].kv.gate.set()
        await harness.until(lambda status: status.state == "serving")
        await harness.until_idle()
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await harness.until_idle()


async def test_a_first_token_that_cannot_be_delivered_ends_the_request_on_both_sides():
    async with cluster(prefill={}) as harness:
        heard = await harness.generate(PROMPT, stop=["?"])
        assert isinstance(heard.error, errors.Internal) and "detokenisation" in heard.error.message
        await harness.until_idle()
