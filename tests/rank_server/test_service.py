"""The lane over a real connection: order, epochs, instances, errors; the progress report during a long command."""

import asyncio
import threading

import grpc
import pytest

from cp_layout.errors import LayoutError
from cp_wire import channels, errors
from cp_wire.host_memory import PoolRefused
from cp_wire.pb import common_pb2, rank_pb2, rank_pb2_grpc
from cp_wire.serve import Server
from model_files import ModelRefused
from rank_server.collectives.base import CollectiveError
from rank_server.models.weights import WeightError
from rank_server.runs import EVERY_TICKET
from rank_server.sequences import PlanRefused
from rank_server.service import RankServicer, command_error
from rank_server.transfer import Transfers
from rank_server.worker import Worker

DEADLINE_S = 10.0


class RecordingExecutor:
    """Stands in for the model: remembers what reached the worker, answers or raises as told."""

    def __init__(self):
        self.plans = []
        self.configured = []
        self.ended = []
        self.load_fraction = 0.0
        self.error = None
        self.block = None

    def reset(self):
        self.plans.append("reset")
        return rank_pb2.ResetDone()

    def configure(self, config, rank, pool_is_settled, *, first_rank, pool_is_shared):
        self.configured.append((config.block_size, rank, pool_is_settled, first_rank, pool_is_shared))
        return rank_pb2.Configured(config=config)

    def allocate_pool(self, num_blocks):
        return rank_pb2.PoolAllocated(num_blocks=num_blocks)

    def run(self, plan, report):
        """As many steps as the plan allows; at its `block`, which may be released by the run's end."""
        if self.block is not None:
            started, release = self.block
            started.set()
            assert release.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        for index in range(plan.ahead):
            report(rank_pb2.StepResult(ticket=plan.ticket, index=index), 0)
        self.plans.append(plan.ticket)
        return rank_pb2.StepResult(ticket=plan.ticket, index=plan.ahead)

    def end_run(self, ticket):
        self.ended.append(ticket)
        if self.block is not None:
            self.block[1].set()


class Lane:
    """The coordinator's end, as thin as can be."""

    def __init__(self, stub):
        self._stub = stub
        self.stream = stub.Execute(timeout=DEADLINE_S)
        self.sequence = 0

    async def send(self, instance="me", epoch=0, sequence=None, **command):
        self.sequence += 1
        await self.stream.write(
            rank_pb2.ExecuteRequest(
                sequence=sequence if sequence is not None else self.sequence, instance=instance, epoch=epoch, **command
            )
        )
        return await self.stream.read()


@pytest.fixture
async def rank():
    executor, worker = RecordingExecutor(), Worker()
    worker.start()
    transfers = Transfers(executor, None, "me", "")
    servicer = RankServicer(executor, worker, transfers, rank=3, instance="me")
    server = Server("127.0.0.1", 0)
    server.add(rank_pb2_grpc.add_RankServiceServicer_to_server, servicer, "kvloom.v1.RankService")
    address = await server.start()
    async with channels.open_channel(address, "prompt") as channel:
        yield rank_pb2_grpc.RankServiceStub(channel), servicer, executor
    await server.stop(0)
    assert await asyncio.to_thread(worker.stop, DEADLINE_S)


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
