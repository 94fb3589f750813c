"""The server: address, health, reflection, stopping."""

import asyncio
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cp_wire import channels
from cp_wire.errors import PortInUse
from cp_wire.pb import coordinator_pb2, coordinator_pb2_grpc
from cp_wire.serve import Server
from tests.cp_wire.services import INFERENCE, Echo, serving

Status = health_pb2.HealthCheckResponse


async def test_l1_health_follows_set_serving_for_every_service():
    async with serving(Echo()) as (server, address), channels.open_channel(address, "control") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def answers():
            requests = [health_pb2.HealthCheckRequest(service=name) for name in ("", INFERENCE)]
            return {(await stub.Check(request, timeout=5)).status for request in requests}

        assert await answers() == {Status.NOT_SERVING}
        server.set_serving(True)
        assert await answers() == {Status.SERVING}
        server.set_serving(False)
        assert await answers() == {Status.NOT_SERVING}
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=5)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_every_watcher_hears_of_changes_after_another_has_left():
    async with serving(Echo()) as (server, address), channels.open_channel(address, "control") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        leaver, stayer = (stub.Watch(health_pb2.HealthCheckRequest(service=INFERENCE), timeout=10) for _ in range(2))
        assert (await leaver.read()).status == (await stayer.read()).status == Status.NOT_SERVING
        leaver.cancel()
        server.set_serving(True)
        assert (await stayer.read()).status == Status.SERVING
        stranger = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"), timeout=10)
        assert (await stranger.read()).status == Status.SERVICE_UNKNOWN


async def test_reflection_lists_the_services():
    async with serving(Echo()) as (_, address), channels.open_channel(address, "control") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5)
        names = {service.name for service in (await call.read()).list_services_response.service}
    assert {INFERENCE, "grpc.health.v1.Health"} <= names


async def test_k9_a_port_in_use_is_named():
    async with serving(Echo()) as (_, address):
        port = int(address.rpartition(":")[2])
        with pytest.raises(PortInUse, match=rf"cannot listen on 127\.0\.0\.1:{port}: address already in use"):
            await Server("127.0.0.1", port, "control").start()


async def test_a_port_held_by_a_plain_socket_is_named():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)):
            await Server("127.0.0.1", port, "control").start()


async def test_an_address_of_another_machine_is_refused():
    with pytest.raises(PortInUse, match=r"192\.0\.2\.1"):
        await Server("192.0.2.1", 0, "control").start()


async def test_k3_stop_ends_an_open_stream_with_a_status():
    async with serving(Echo()) as (server, address), channels.open_channel(address, "control") as channel:
        request = coordinator_pb2.GenerateRequest(text="a", max_tokens=60_000)
        call = coordinator_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=30)
        await call.read()
        await asyncio.wait_for(server.stop(0.05), 2)
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.wait_for(call.read(), 1)
    assert caught.value.code() is not grpc.StatusCode.OK


async def test_a_service_cannot_be_added_late():
    async with serving(Echo()) as (server, _):
        with pytest.raises(RuntimeError, match=INFERENCE):
            server.add(coordinator_pb2_grpc.add_InferenceServiceServicer_to_server, Echo(), INFERENCE)


async def test_stop_before_start_and_twice():
    await Server("127.0.0.1", 0).stop(0)
    async with serving(Echo()) as (server, _):
        await server.stop(0)
