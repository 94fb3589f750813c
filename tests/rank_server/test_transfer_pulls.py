"""Pulls between whole ranks that fail or are stopped: what they say, and that nothing is written afterwards."""

import asyncio
from unittest import mock

from cp_wire import errors
from cp_wire.pb import rank_pb2
from rank_server.pool_store import HostStore
from tests.rank_server.transfers import Gated, halfway, leased, refusal
from tests.wired import DEADLINE_S


async def stays_as_it_is(running, gate):
    """What the source still sends arrives nowhere."""
    before = running.target.written(0)
    gate.go.set()
    # Whole answers over the same connections come after whatever was on its way.
    for _ in range(3):
        await running.target.command(step=rank_pb2.StepPlan(ticket=1, timeout_ms=1000, decode_mode=1, gather=1))
    assert running.target.written(0) == before
    assert running.target.transfers[0].active == (0, 0)


async def test_h3_a_source_that_is_gone_fails_the_pull(tiny):
    async with leased(tiny) as (running, moved, _):
        await running.source.stop_rank(0)
        (answer,) = await running.pull(moved)
        assert (answer.failure.reason, answer.failure.transient, answer.retries) == ("UNAVAILABLE", True, 2)
        assert running.target.written(0) == 0


async def test_a_slow_pull_ends_at_its_bound(tiny):
    async with leased(tiny, servicer=Gated) as (running, moved, _):
        (answer,) = await running.pull(moved, timeout_ms=300)
        assert (answer.failure.reason, answer.failure.transient) == ("DEADLINE_EXCEEDED", True)
        assert "not done after 0.3 s" in answer.failure.message
        running.source.servicers[0].go.set()


async def test_h7_a_pull_that_is_cancelled_halfway_writes_nothing_more(tiny):
    async with halfway(tiny) as (running, moved, call, gate):
        call.cancel()
        await asyncio.wait_for(running.end(moved), DEADLINE_S)
        await stays_as_it_is(running, gate)


async def test_h7_a_pull_that_is_ended_halfway_writes_nothing_more(tiny):
    async with halfway(tiny) as (running, moved, call, gate):
        await running.end(moved)
        error = await refusal(call)
        assert isinstance(error, errors.Stale) and "attempt 1 of transfer 1 was stopped" in error.message
        await stays_as_it_is(running, gate)
        late = await refusal(running.target.stubs[0].Pull(running.pull_of(moved, 0, 0, 31), timeout=DEADLINE_S))
        assert isinstance(late, errors.Stale) and "is over on this rank" in late.message


async def test_a_reset_stops_pulls(tiny):
    async with halfway(tiny) as (running, _, call, gate):
        running.target.epoch = 1
        await running.target.command(reset=rank_pb2.Reset())
        assert isinstance(await refusal(call), errors.Stale)
        await stays_as_it_is(running, gate)


async def test_h5_a_newer_attempt_takes_the_older_one_s_place(tiny):
    async with halfway(tiny) as (running, moved, call, gate):
        again = asyncio.create_task(running.pull(moved))
        assert isinstance(await refusal(call), errors.Stale)
        gate.go.set()
        (answer,) = await again
        assert not answer.HasField("failure") and answer.stale == 0
        error = await refusal(running.target.stubs[0].Pull(running.pull_of(moved, 0, 0, 31, attempt=2), timeout=DEADLINE_S))
        assert "attempt 2 of transfer 1 comes after attempt 2" in error.message
        assert running.target.written(0) == running.source.written(0)


async def test_h1_a_lease_that_is_ended_halfway_fails_the_pull(tiny):
    async with halfway(tiny) as (running, moved, call, gate):
        request = rank_pb2.EndLeaseRequest(instance="source-0", session=moved.session)
        assert (await running.source.stubs[0].EndLease(request, timeout=DEADLINE_S)).how == "cancelled"
        gate.go.set()
        answer = await call
        assert (answer.failure.reason, answer.failure.transient) == ("LEASE_ENDED", False)


async def test_what_a_device_still_computes_comes_before_its_pool_is_read_or_written(tiny):
    with mock.patch.object(HostStore, "fence") as fence:
        async with leased(tiny) as (running, moved, _):
            assert fence.call_count == 1
            await running.pull(moved)
            assert fence.call_count == 2
