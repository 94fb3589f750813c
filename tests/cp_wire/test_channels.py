"""Channels and servers: sizes in both directions, loops, pings."""

import asyncio

import grpc
import pytest

from cp_wire import channels, errors
from cp_wire.pb import coordinator_pb2, coordinator_pb2_grpc
from tests.cp_wire.services import Echo, serving


async def first_event(channel, request):
    stub = coordinator_pb2_grpc.InferenceServiceStub(channel)
    call = stub.Generate(request, timeout=20)
    return await call.read()


async def test_k2_a_prompt_of_a_million_token_ids_travels_both_ways():
    ids = [49_151] * 1_000_000
    async with serving(Echo(), "prompt") as (_, address), channels.open_channel(address, "prompt") as channel:
        event = await first_event(channel, coordinator_pb2.GenerateRequest(tokens=coordinator_pb2.TokenPrompt(ids=ids)))
    assert len(event.tokens.token_ids) == 1_000_000


@pytest.mark.parametrize("kind", ["control", "data", "prompt"])
async def test_k2_one_byte_above_the_limit_is_refused(kind):
    limit = channels.MAX_MESSAGE_BYTES[kind]
    request = coordinator_pb2.AbortRequest(request_id="x" * (limit - 5))
    assert request.ByteSize() == limit
    async with serving(Echo(), kind) as (_, address), channels.open_channel(address, kind) as channel:
        stub = coordinator_pb2_grpc.InferenceServiceStub(channel)
        await stub.Abort(request, timeout=20)
        request.request_id += "x"
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Abort(request, timeout=20)
    assert isinstance(errors.from_rpc_error(caught.value), errors.MessageTooLarge)


def test_k5_a_channel_in_each_of_three_loops():
    async def once():
        async with serving(Echo()) as (_, address), channels.open_channel(address, "control") as channel:
            return (await first_event(channel, coordinator_pb2.GenerateRequest(text="loop"))).tokens.text

    assert [asyncio.run(once()) for _ in range(3)] == ["loop"] * 3


async def test_k5_a_blocking_channel_from_a_thread():
    def ask(address):
        with channels.open_sync_channel(address, "control") as channel:
            stub = coordinator_pb2_grpc.InferenceServiceStub(channel)
            return next(iter(stub.Generate(coordinator_pb2.GenerateRequest(text="thread"), timeout=10))).tokens.text

    async with serving(Echo()) as (_, address):
        assert await asyncio.to_thread(ask, address) == "thread"


def test_k4_both_ends_agree_on_pings():
    client = dict(channels.options("control", server=False))
    server = dict(channels.options("control", server=True))
    assert server["grpc.http2.min_recv_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]
    assert server["grpc.http2.max_ping_strikes"] == 0
    assert client["grpc.keepalive_permit_without_calls"] == server["grpc.keepalive_permit_without_calls"] == 1
    assert client["grpc.http2.ping_timeout_ms"] == server["grpc.http2.ping_timeout_ms"] == 20_000
    assert client["grpc.enable_http_proxy"] == 0
    assert server["grpc.so_reuseport"] == 0
    # Beyond gRPC's own 1000 a burst would be answered CANCELLED instead of reaching the queue's limit.
    assert server["grpc.server.max_pending_requests"] == 100_000


@pytest.mark.sweep
async def test_k4_a_silent_stream_survives_eager_pings(monkeypatch):
    eager = tuple((key, 1_000 if key == "grpc.keepalive_time_ms" else value) for key, value in channels._COMMON)
    monkeypatch.setattr(channels, "_COMMON", eager)
    async with serving(Echo()) as (_, address), channels.open_channel(address, "control") as channel:
        stub = coordinator_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(coordinator_pb2.GenerateRequest(text="quiet", max_tokens=30_000), timeout=60)
        assert (await call.read()).tokens.text == "quiet"
        assert (await call.read()).finished.finish_reason == "stop"
