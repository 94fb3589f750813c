"""What operators call."""

from collections.abc import AsyncIterator, Awaitable, Callable

import grpc.aio

from coordinator.tasks import Changes
from cp_wire.pb import common_pb2, coordinator_pb2, coordinator_pb2_grpc


class ControlServicer(coordinator_pb2_grpc.ControlServiceServicer):
    """Status, configuration and drain."""

    def __init__(
        self,
        status: Callable[[int], coordinator_pb2.GetStatusResponse],
        config: Callable[[], common_pb2.ClusterConfig],
        drain: Callable[[float], Awaitable[int]],
        changes: Changes,
    ) -> None:
        self._status = status
        self._config = config
        self._drain = drain
        self._changes = changes

    async def GetStatus(
        self, request: coordinator_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> coordinator_pb2.GetStatusResponse:
        """A snapshot."""
        return self._status(request.last_steps)

    async def GetConfig(
        self, request: coordinator_pb2.GetConfigRequest, context: grpc.aio.ServicerContext
    ) -> coordinator_pb2.GetConfigResponse:
        """The effective configuration."""
        return coordinator_pb2.GetConfigResponse(config=self._config())

    async def Drain(
        self, request: coordinator_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> coordinator_pb2.DrainResponse:
        """Answers when no request is left."""
        return coordinator_pb2.DrainResponse(ended=await self._drain(request.deadline_ms / 1000))

    async def WatchStatus(
        self, request: coordinator_pb2.WatchStatusRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[coordinator_pb2.WatchStatusResponse]:
        """Never ends by itself; changes that come faster than the reader reads are merged."""
        seen = self._changes.version
        while True:
            yield coordinator_pb2.WatchStatusResponse(status=self._status(0))
            seen = await self._changes.beyond(seen)
