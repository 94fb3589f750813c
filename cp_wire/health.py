"""grpc.health.v1 for one process: all its services serve, or none does."""

import asyncio
from collections.abc import AsyncIterator, Iterable

import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from cp_wire.errors import Unknown, abort


class Health(health_pb2_grpc.HealthServicer):
    """Answers for "" (the process) and for each of `services`; starts as NOT_SERVING."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = {"", *services}
        self._status = HealthCheckResponse.NOT_SERVING
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Changes the answer of every service and wakes all watchers."""
        self._status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: HealthCheckRequest, context: grpc.aio.ServicerContext) -> HealthCheckResponse:
        """Current status; NOT_FOUND for a service this process does not have."""
        if request.service not in self._services:
            await abort(context, Unknown(f"no service {request.service!r} here"))
        return HealthCheckResponse(status=self._status)

    async def Watch(self, request: HealthCheckRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[HealthCheckResponse]:
        """Status at once, then at each change; SERVICE_UNKNOWN for a service this process does not have."""
        last = None
        while True:
            changed = self._changed
            status = self._status if request.service in self._services else HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                yield HealthCheckResponse(status=status)
                last = status
            await changed.wait()
