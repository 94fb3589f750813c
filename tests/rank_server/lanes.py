"""A rank without a model that answers over a real connection, and the coordinator's end of its lane."""

import asyncio
from contextlib import asynccontextmanager

from cp_wire import channels
from cp_wire.pb import rank_pb2, rank_pb2_grpc
from cp_wire.serve import Server
from rank_server.service import RankServicer
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


@asynccontextmanager
async def answering():
    """A rank that answers over a real connection: (stub, servicer, executor)."""
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
