"""A cluster in this process whose ranks are whole: lane, transfer calls and the service that others pull from, on loopback."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from cp_layout.grid import Grid
from cp_layout.reshard import Side as Layouted
from cp_wire.channels import open_channel
from cp_wire.pb import rank_pb2, rank_pb2_grpc
from cp_wire.serve import Server
from kv_transfer.pull import Limits
from kv_transfer.service import SERVICE, KvTransferServicer, add_to_server
from model_files import open_model
from rank_server.service import RankServicer
from rank_server.transfer import Transfers
from tests.inproc import InprocCluster, Shape

DEADLINE_S = 60.0
LIMITS = Limits(message_bytes=1024, idle_s=5, call_s=5, deadline_s=30)


class Wired(InprocCluster):
    """A cluster whose ranks are servers; plans go through their lanes. Steps must not be called on the event loop's thread."""

    def __init__(
        self,
        model: Path,
        shape: Shape,
        name: str,
        *,
        host: str = "",
        clock: Callable[[], float] = time.monotonic,
        servicer: Callable[[Transfers], KvTransferServicer] = KvTransferServicer,
    ) -> None:
        super().__init__(model, shape)
        self.name = name
        self.loop = asyncio.get_running_loop()
        files = open_model(model)
        spec = files.shape
        self.side = Layouted(
            Grid(shape.tp, shape.pcp, shape.dcp), self.layout, None if spec.mla is not None else spec.num_kv_heads
        )
        self.instances = [f"{name}-{rank}" for rank in range(self.grid.world_size)]
        self.transfers = [
            Transfers(executor, files, instance, host, clock=clock, limits=LIMITS)
            for executor, instance in zip(self.executors, self.instances, strict=True)
        ]
        self.servicers = [servicer(transfers) for transfers in self.transfers]
        self.epoch = 0
        self.addresses: list[str] = []
        self.stubs: list[rank_pb2_grpc.RankServiceStub] = []
        self._servers: list[Server] = []
        self._channels: list = []
        self._lanes: list = []
        self._commands = 0
        self._told: list[rank_pb2.ExecuteResponse] = []

    async def serve(self) -> None:
        for rank, (executor, worker, transfers) in enumerate(zip(self.executors, self.workers, self.transfers, strict=True)):
            servicer = RankServicer(executor, worker, transfers, rank, self.instances[rank])
            server = Server("127.0.0.1", 0)
            server.add(rank_pb2_grpc.add_RankServiceServicer_to_server, servicer, "kvloom.v1.RankService")
            server.add(add_to_server, self.servicers[rank], SERVICE)
            self._servers.append(server)
            self.addresses.append(await server.start())
            self._channels.append(open_channel(self.addresses[-1], "prompt"))
            self.stubs.append(rank_pb2_grpc.RankServiceStub(self._channels[-1]))
            self._lanes.append(self.stubs[-1].Execute())

    async def stop(self) -> None:
        for transfers in self.transfers:
            await transfers.close()
        for channel in self._channels:
            await channel.close()
        for server in self._servers:
            await server.stop(0)
        await asyncio.to_thread(self.close)

    async def stop_rank(self, rank: int) -> None:
        """Its process is gone, as far as anybody can see."""
        await self._servers[rank].stop(0)

    def execute(self, plan: rank_pb2.StepPlan) -> list[list[rank_pb2.StepResult]]:
        self._told = []
        last = asyncio.run_coroutine_threadsafe(self.command(step=plan), self.loop).result(DEADLINE_S)
        told: dict[int, list[rank_pb2.StepResult]] = {}
        for answer in self._told:
            told.setdefault(answer.step.index, []).append(answer.step)
        return [*(told[index] for index in sorted(told)), [answer.step for answer in last]]

    async def command(self, **command) -> list[rank_pb2.ExecuteResponse]:  # type: ignore[no-untyped-def]
        self._commands += 1
        for lane, instance in zip(self._lanes, self.instances, strict=True):
            await lane.write(rank_pb2.ExecuteRequest(sequence=self._commands, epoch=self.epoch, instance=instance, **command))
        return [await asyncio.wait_for(self._answer(lane), DEADLINE_S) for lane in self._lanes]

    async def _answer(self, lane) -> rank_pb2.ExecuteResponse:  # type: ignore[no-untyped-def]
        """What it tells before is kept."""
        while True:
            answer = await lane.read()
            assert answer.WhichOneof("result") != "error", answer.error
            if not answer.more:
                return answer
            self._told.append(answer)

    def written(self, rank: int) -> int:
        """Numbers in the rank's pool; what was never written is NaN."""
        return int((~self.executors[rank].pool._data.isnan()).sum())
