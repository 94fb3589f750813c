"""A gRPC server with health and reflection, the same for every process."""

import socket
from collections.abc import Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cp_wire.channels import Kind, new_server
from cp_wire.errors import PortInUse
from cp_wire.health import Health
from cp_wire.host import join_address


class Server:
    """Services on one address. Starts as NOT_SERVING in grpc.health.v1; `set_serving` changes it for all services at once.

    `host` is a name or an address, also an IPv6 one without brackets; `port` 0 lets the system choose.
    """

    def __init__(self, host: str, port: int, kind: Kind = "prompt") -> None:
        self._host, self._port, self._kind = host, port, kind
        self._services: list[tuple[Callable[[Any, grpc.aio.Server], None], object, str]] = []
        self._server: grpc.aio.Server | None = None
        self._health: Health | None = None

    def add(self, add_fn: Callable[[Any, grpc.aio.Server], None], servicer: object, full_name: str) -> None:
        """Registers a servicer through its generated `add_…_to_server`; only before `start`."""
        if self._server is not None:
            raise RuntimeError(f"{full_name} was added after the server had started")
        self._services.append((add_fn, servicer, full_name))

    async def start(self) -> str:
        """Listens and returns HOST:PORT; raises PortInUse when it cannot."""
        if self._port:
            probe(self._host, self._port)
        server = new_server(self._kind)
        names = [name for _, _, name in self._services]
        for add_fn, servicer, _ in self._services:
            add_fn(servicer, server)
        self._health = Health(names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            port = server.add_insecure_port(join_address(self._host, self._port))
        except RuntimeError as error:
            raise PortInUse(self._host, self._port, "the system refuses the address") from error
        await server.start()
        self._server = server
        return join_address(self._host, port)

    def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 answers from now on."""
        if self._health is None:
            raise RuntimeError("the server has not started")
        self._health.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls at once, gives the running ones `grace_s` seconds, then cancels them. Idempotent."""
        if self._server is None or self._health is None:
            return
        self._health.set_serving(False)
        await self._server.stop(grace_s)


def probe(host: str, port: int) -> None:
    """Raises PortInUse with the system's own words: gRPC tells only that binding failed, after noise on
    stderr, and an event loop puts more around them."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            # A listener with SO_REUSEADDR shows only here.
            probe.listen(1)
    except OSError as error:
        raise PortInUse(host, port, (error.strerror or str(error)).lower()) from error
