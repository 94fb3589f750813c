"""How a lane ends: by the coordinator, by a rank that stops, and what is left of a command that it was saying."""

import asyncio
import threading

import grpc
import pytest

from cp_wire import errors
from cp_wire.pb import rank_pb2
from rank_server.runs import EVERY_TICKET
from tests.rank_server.lanes import DEADLINE_S, Lane


async def test_what_a_command_says_ends_with_the_lane_that_hears_it(rank, monkeypatch):
    """Its answers are left half-way, and nothing of them stays behind for the collector of garbage."""
    _, servicer, _ = rank
    ended: list[str] = []

    async def answers(request):
        try:
            yield rank_pb2.ExecuteResponse(more=True)
            yield rank_pb2.ExecuteResponse()
        finally:
            ended.append("answers")

    class Broken:
        async def write(self, response):
            raise asyncio.CancelledError

    async def requests():
        yield rank_pb2.ExecuteRequest(sequence=1)

    left = answers(None)
    monkeypatch.setattr(servicer, "_answers", lambda request: left)
    with pytest.raises(asyncio.CancelledError):
        await servicer.Execute(requests(), Broken())
    assert ended == ["answers"] and servicer.lane_closed.is_set()


async def test_lane_closed_is_seen_when_the_coordinator_goes(rank):
    stub, servicer, _ = rank
    lane = Lane(stub)
    await lane.send(reset=rank_pb2.Reset())
    lane.stream.cancel()
    await asyncio.wait_for(servicer.lane_closed.wait(), DEADLINE_S)


async def test_k8_a_stopping_rank_ends_its_lane_whatever_the_worker_does(rank):
    stub, servicer, executor = rank
    executor.block = started, release = threading.Event(), threading.Event()
    lane = Lane(stub)
    step = asyncio.create_task(lane.send(step=rank_pb2.StepPlan(ticket=1)))
    assert await asyncio.to_thread(started.wait, DEADLINE_S)
    try:
        servicer.end_lane()
        assert await step is grpc.aio.EOF
        assert await lane.stream.code() is grpc.StatusCode.OK
        assert servicer.lane_closed.is_set()
    finally:
        release.set()


async def test_k8_a_stopping_rank_ends_a_lane_that_waits_for_commands(rank):
    stub, servicer, executor = rank
    lane = Lane(stub)
    await lane.send(step=rank_pb2.StepPlan(ticket=1))
    # An answer may be here before the rank's own end of writing it is: no status can be sent until then.
    await stub.GetProgress(rank_pb2.GetProgressRequest(), timeout=DEADLINE_S)
    coming = asyncio.ensure_future(lane.stream.read())
    servicer.end_lane()
    assert await coming is grpc.aio.EOF
    assert await lane.stream.code() is grpc.StatusCode.OK
    assert servicer.lane_closed.is_set()
    assert executor.plans == [1]
    assert executor.ended == [EVERY_TICKET]


async def test_k8_a_stopping_rank_takes_no_lane(rank):
    stub, servicer, executor = rank
    servicer.end_lane()
    with pytest.raises(grpc.RpcError) as caught:
        await Lane(stub).send(reset=rank_pb2.Reset())
    assert errors.from_rpc_error(caught.value).message == "rank 3 is stopping"
    assert executor.plans == []
