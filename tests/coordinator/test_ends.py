"""Every way a request may end before its time: abort, disconnect, drain, shutdown."""

import asyncio
import threading

import pytest

from coordinator.app import Options
from coordinator.engine import Engine
from cp_wire import errors
from cp_wire.pb import coordinator_pb2
from tests.coordinator.fake_rank import continuation
from tests.coordinator.harness import FakeText, cluster, eventually, listen


async def test_abort_ends_the_stream_in_every_state():
    async with cluster(max_num_seqs=1) as harness:
        held = asyncio.create_task(harness.ranks[0].hold())
        running = asyncio.create_task(harness.generate([1], request_id="running"))
        await held
        queued = asyncio.create_task(harness.generate([2], request_id="queued"))
        await harness.until_queued(2)
        for request_id in ("queued", "running"):
            await harness.inference.Abort(coordinator_pb2.AbortRequest(request_id=request_id), timeout=5)
        for heard in (await queued, await running):
            assert heard.finished.finish_reason == "abort"
        harness.ranks[0].gate.set()
        await harness.until_idle()
        with pytest.raises(errors.RpcError) as caught:
            await harness.inference.Abort(coordinator_pb2.AbortRequest(request_id="running"), timeout=5)
        assert isinstance(errors.from_rpc_error(caught.value), errors.Unknown)
        assert (await harness.generate([1])).token_ids == continuation([1], 8)


@pytest.mark.parametrize("state", ["queued", "prefill", "decode"])
async def test_h6_disconnect_frees_blocks_within_two_steps(state):
    async with cluster(pcp=2, dcp=2, max_num_seqs=1 if state == "queued" else 4) as harness:
        rank = harness.ranks[0]
        held = asyncio.create_task(rank.hold())
        other = asyncio.create_task(harness.generate([9], max_tokens=4)) if state == "queued" else None
        if state == "decode":
            rank.gate.set()
            held.cancel()
        elif state == "queued":
            await held
        call = harness.call(list(range(40)), max_tokens=80)
        if state == "decode":
            async for event in call:
                if event.HasField("tokens"):
                    break
            await rank.hold()
        elif state == "prefill":
            await held
        else:
            await harness.until_queued(2)
        call.cancel()
        await harness.until_active(0 if other is None else 1)
        if state == "decode":
            await eventually(lambda: rank.run_to_end == rank.steps[-1].ticket)
        steps = len(rank.steps)
        rank.gate.set()
        if other is not None:
            assert (await other).token_ids == continuation([9], 4)
            assert all(len(row.token_ids) == 1 for plan in rank.steps for row in plan.rows), "the cancelled one never ran"
        await harness.until_idle()
        if other is None:
            assert len(rank.steps) <= steps + 2


async def test_nineteen_cancelled_in_the_queue_leave_room_for_one():
    async with cluster(max_num_seqs=1) as harness:
        held = asyncio.create_task(harness.ranks[0].hold())
        first = asyncio.create_task(harness.generate([1]))
        await held
        queued = [harness.call([2 + index]) for index in range(19)]
        await harness.until_queued(20)
        for call in queued:
            call.cancel()
        await harness.until_active(1)
        harness.ranks[0].gate.set()
        assert (await first).token_ids == continuation([1], 8)
        assert (await harness.generate([50])).token_ids == continuation([50], 8)
        await harness.until_idle()


async def test_client_that_reads_late_gets_everything():
    async with cluster(max_model_len=4000, options=Options()) as harness:
        call = harness.call([3], max_tokens=200)
        await eventually(lambda: harness.scheduler.running == 0 and harness.ranks[0].steps)
        await harness.until_idle()
        assert (await listen(call)).token_ids == continuation([3], 200)


async def test_k3_shutdown_ends_open_calls_with_a_status():
    async with cluster() as harness:
        held = asyncio.create_task(harness.ranks[0].hold())
        call = asyncio.create_task(harness.generate([1]))
        await held
        status = await harness.status()
        assert (status.running, status.state) == (1, "serving")
        harness.ranks[0].gate.set()
        harness.ranks[0].gate.clear()
        stop = asyncio.create_task(harness.coordinator.drain(0))
        heard = await call
        assert isinstance(heard.error, errors.Unavailable) and heard.finished is None
        assert await stop == 1


async def test_m5_drain_finishes_the_accepted_and_refuses_the_new():
    async with cluster(max_num_seqs=1) as harness:
        held = asyncio.create_task(harness.ranks[0].hold())
        calls = [asyncio.create_task(harness.generate([index])) for index in range(3)]
        await held
        await harness.until_queued(3)
        drained = harness.control.Drain(coordinator_pb2.DrainRequest(deadline_ms=5000), timeout=10)
        status = await harness.until(lambda status: status.state == "draining")
        assert status.running + status.waiting == 3
        assert isinstance((await harness.generate([9])).error, errors.Unavailable)
        harness.ranks[0].gate.set()
        for index, call in enumerate(calls):
            assert (await call).token_ids == continuation([index], 8)
        assert (await drained).ended == 0


async def test_a_drain_is_told_to_a_request_that_is_still_being_prepared(monkeypatch):
    started, release = threading.Event(), threading.Event()

    def slow(self, text):
        started.set()
        assert release.wait(30)
        return [1]

    monkeypatch.setattr(FakeText, "encode", slow)
    async with cluster() as harness:
        request = coordinator_pb2.GenerateRequest(text="ab", max_tokens=2)
        call = asyncio.create_task(listen(harness.inference.Generate(request, timeout=10)))
        try:
            assert await asyncio.to_thread(started.wait, 30)
            drained = asyncio.create_task(harness.coordinator.drain(5))
            await harness.until(lambda status: status.state == "draining")
        finally:
            release.set()
        heard = await call
        assert isinstance(heard.error, errors.Unavailable) and heard.error.retryable
        assert heard.error.message == "the server is draining"
        assert await drained == 0


async def test_a_disconnected_request_that_cannot_be_ended_breaks_the_set_and_frees_its_id(monkeypatch):
    async with cluster() as harness:
        rank = harness.ranks[0]
        held = asyncio.create_task(rank.hold())
        call = harness.call([1], request_id="mine")
        await held

        def fail(handle):
            raise KeyError(handle)

        with monkeypatch.context() as patch:
            patch.setattr(harness.scheduler, "abort", fail)
            call.cancel()
            await harness.until_active(0)
            rank.gate.set()
            await eventually(lambda: harness.home.epoch == 2 and harness.home.ready)
        assert (await harness.generate([7], request_id="mine")).token_ids == continuation([7], 8)
        await harness.until_idle()


async def test_an_id_is_free_after_its_call_whatever_else_fails(monkeypatch):
    def fail(self, handle):
        raise KeyError(handle)

    async with cluster() as harness:
        held = asyncio.create_task(harness.ranks[0].hold())
        call = harness.call([1], request_id="mine")
        await held
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "abort", fail)
            call.cancel()
            await harness.until_active(0)
        harness.ranks[0].gate.set()
        assert (await harness.generate([7], request_id="mine")).token_ids == continuation([7], 8)
