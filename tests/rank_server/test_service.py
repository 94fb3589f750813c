"""The lane over a real connection: order, epochs, instances, errors."""

import asyncio

import grpc
import pytest

from cp_layout.errors import LayoutError
from cp_wire import errors
from cp_wire.host_memory import PoolRefused
from cp_wire.pb import common_pb2, rank_pb2
from model_files import ModelRefused
from rank_server.collectives.base import CollectiveError
from rank_server.models.weights import WeightError
from rank_server.sequences import PlanRefused
from rank_server.service import command_error
from tests.rank_server.lanes import DEADLINE_S, Lane


async def test_commands_are_answered_in_order(rank):
    stub, _, executor = rank
    lane = Lane(stub)
    for ticket in (5, 6, 9):
        answer = await lane.send(step=rank_pb2.StepPlan(ticket=ticket))
        assert (answer.sequence, answer.step.ticket, answer.instance) == (lane.sequence, ticket, "me")
    assert executor.plans == [5, 6, 9]


async def test_the_steps_of_a_run_are_told_in_order(rank):
    stub, _, _ = rank
    lane = Lane(stub)
    answers = [await lane.send(step=rank_pb2.StepPlan(ticket=5, ahead=3))]
    answers += [await lane.stream.read() for _ in range(3)]
    assert [(answer.sequence, answer.step.index, answer.more) for answer in answers] == [
        (1, 0, True), (1, 1, True), (1, 2, True), (1, 3, False),
    ]  # fmt: skip
    assert [answer.worker_us for answer in answers[:3]] == [0, 0, 0]
    assert (await lane.send(reset=rank_pb2.Reset())).sequence == 2


async def test_a_gap_in_the_sequence_ends_the_lane(rank):
    stub, servicer, executor = rank
    lane = Lane(stub)
    with pytest.raises(grpc.RpcError) as caught:
        await lane.send(sequence=2, reset=rank_pb2.Reset())
    assert "expected command 1, got 2" in str(errors.from_rpc_error(caught.value))
    await asyncio.wait_for(servicer.lane_closed.wait(), DEADLINE_S)
    assert executor.plans == []


async def test_h15_another_instance_is_refused(rank):
    stub, _, executor = rank
    answer = await Lane(stub).send(instance="former", step=rank_pb2.StepPlan(ticket=1))
    assert answer.error.reason == "PLAN_REFUSED"
    assert "'former'" in answer.error.message
    assert executor.plans == []


async def test_epochs_only_rise_and_rise_with_a_reset(rank):
    stub, _, executor = rank
    lane = Lane(stub)
    assert (await lane.send(epoch=2, step=rank_pb2.StepPlan(ticket=1))).error.reason == "PLAN_REFUSED"
    assert (await lane.send(epoch=2, reset=rank_pb2.Reset())).WhichOneof("result") == "reset_done"
    assert "is at epoch 2" in (await lane.send(epoch=1, step=rank_pb2.StepPlan(ticket=2))).error.message
    assert (await lane.send(epoch=2, step=rank_pb2.StepPlan(ticket=3))).step.ticket == 3
    assert executor.plans == ["reset", 3]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(CollectiveError("group dcp:0: peer gone"), "COLLECTIVE_FAILED"), (RuntimeError("odd"), "INTERNAL")],
)
async def test_h18_a_failed_command_is_an_answer_and_the_lane_lives(rank, error, reason):
    stub, _, executor = rank
    lane = Lane(stub)
    executor.error = error
    answer = await lane.send(step=rank_pb2.StepPlan(ticket=1))
    assert (answer.error.reason, str(error) in answer.error.message) == (reason, True)
    executor.error = None
    assert (await lane.send(step=rank_pb2.StepPlan(ticket=2))).step.ticket == 2


async def test_a_rank_hears_what_its_pool_is_for_and_where_its_grid_begins(rank):
    stub, _, executor = rank
    lane = Lane(stub)
    config = common_pb2.ClusterConfig(block_size=8)
    for fields in ({"pool_is_settled": True}, {"first_rank": 2}, {"pool_is_shared": True}):
        await lane.send(configure=rank_pb2.Configure(config=config, rank=3, **fields))
    assert executor.configured == [(8, 3, True, 0, False), (8, 3, False, 2, False), (8, 3, False, 0, True)]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PlanRefused("no"), "PLAN_REFUSED"),
        (errors.ConfigRefused("no"), "CONFIG_REFUSED"),
        (LayoutError("no"), "CONFIG_REFUSED"),
        (PoolRefused("no"), "POOL_REFUSED"),
        (WeightError("no"), "MODEL_REFUSED"),
        (ModelRefused("no"), "MODEL_REFUSED"),
        (MemoryError("no"), "OUT_OF_MEMORY"),
    ],
)
def test_every_refusal_has_its_stable_word(error, reason):
    assert command_error(error) == rank_pb2.CommandError(reason=reason, message="no")


async def test_only_one_lane(rank):
    stub, _, _ = rank
    first = Lane(stub)
    await first.send(allocate_pool=rank_pb2.AllocatePool(num_blocks=1))
    with pytest.raises(grpc.RpcError) as caught:
        await Lane(stub).send(reset=rank_pb2.Reset())
    assert "already has a lane" in str(errors.from_rpc_error(caught.value))
    assert (await first.send(allocate_pool=rank_pb2.AllocatePool(num_blocks=2))).pool_allocated.num_blocks == 2
