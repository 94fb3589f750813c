"""What is asked of a rank beside its lane, while a command computes: the end of a run, and how far it has got."""

import asyncio
import threading

import grpc
import pytest

from cp_wire import errors
from cp_wire.pb import rank_pb2
from tests.rank_server.lanes import DEADLINE_S, Lane


async def test_a_run_is_ended_from_beside_the_lane_while_it_computes(rank):
    stub, _, executor = rank
    executor.block = threading.Event(), threading.Event()
    lane = Lane(stub)
    computing = asyncio.create_task(lane.send(step=rank_pb2.StepPlan(ticket=5)))
    assert await asyncio.to_thread(executor.block[0].wait, DEADLINE_S)
    await stub.EndRun(rank_pb2.EndRunRequest(instance="me", epoch=0, ticket=5), timeout=DEADLINE_S)
    assert (await computing).step.ticket == 5 and executor.ended == [5]


@pytest.mark.parametrize("other", [{"instance": "former"}, {"epoch": 1}])
async def test_h15_a_run_of_another_life_is_not_ended(rank, other):
    stub, _, executor = rank
    with pytest.raises(grpc.RpcError) as caught:
        await stub.EndRun(rank_pb2.EndRunRequest(**({"instance": "me", "epoch": 0, "ticket": 5} | other)), timeout=DEADLINE_S)
    assert isinstance(errors.from_rpc_error(caught.value), errors.Stale) and not executor.ended


async def test_progress_is_answered_while_the_worker_is_busy(rank):
    stub, _, executor = rank
    executor.block = started, release = threading.Event(), threading.Event()
    lane = Lane(stub)
    step = asyncio.create_task(lane.send(step=rank_pb2.StepPlan(ticket=1)))
    assert await asyncio.to_thread(started.wait, DEADLINE_S)
    executor.load_fraction = 0.25
    progress = await stub.GetProgress(rank_pb2.GetProgressRequest(), timeout=DEADLINE_S)
    assert (progress.running_sequence, progress.rank, progress.instance, progress.load_fraction) == (1, 3, "me", 0.25)
    release.set()
    assert (await step).step.ticket == 1
    assert (await stub.GetProgress(rank_pb2.GetProgressRequest(), timeout=DEADLINE_S)).running_sequence == 0
