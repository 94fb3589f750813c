"""The life of a fake rank's process, and what is seen of it from outside."""

import asyncio
import time

import grpc.aio

from cp_wire import errors
from cp_wire.channels import open_channel
from cp_wire.pb import coordinator_pb2, coordinator_pb2_grpc, rank_pb2, rank_pb2_grpc
from cp_wire.serve import Server
from tests.coordinator.fake_kv import PROCESSES


class FakeProcess:
    """Part of `FakeRank`."""

    async def start(self, coordinator: str) -> None:
        """Listens and registers; raises the KvloomError of a refused registration."""
        self.room.enter(self.rank)
        PROCESSES[self.instance] = self
        self._server = Server("127.0.0.1", 0, "prompt")
        self._server.add(rank_pb2_grpc.add_RankServiceServicer_to_server, self, "kvloom.v1.RankService")
        address = await self._server.start()
        request = coordinator_pb2.RegisterRequest(
            rank=self.rank,
            address=address,
            instance=self.instance,
            pid=1000 + self.rank,
            protocol_version=self.protocol_version,
            model_hash=self.model_hash,
            host=self.host,
        )
        async with open_channel(coordinator, "control") as channel:
            try:
                await coordinator_pb2_grpc.RegistryServiceStub(channel).Register(request, timeout=5)
            except errors.RpcError as error:
                raise errors.from_rpc_error(error) from None

    async def die(self) -> None:
        """The process is gone: its sockets close."""
        self.room.leave(self.rank)
        PROCESSES.pop(self.instance, None)
        if self._server is not None:
            await self._server.stop(0)

    async def hold(self) -> None:
        """Returns once a command waits at the closed gate."""
        self.gate.clear()
        self.at_gate.clear()
        await asyncio.wait_for(self.at_gate.wait(), 5)

    async def GetProgress(
        self, request: rank_pb2.GetProgressRequest, context: grpc.aio.ServicerContext
    ) -> rank_pb2.GetProgressResponse:
        if self.frozen:
            await asyncio.Event().wait()
        return rank_pb2.GetProgressResponse(
            instance=self.instance,
            rank=self.rank,
            running_sequence=self._running,
            last_progress_ms=int(1000 * (time.monotonic() - self._last_progress)),
            load_fraction=self.load_fraction,
        )
