"""The metrics endpoint: what it answers to whom."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
from prometheus_client.core import GaugeMetricFamily

from cp_wire import metrics_server
from cp_wire.errors import PortInUse
from cp_wire.metrics_server import HEAD_BYTES, MetricsServer


class Broken(Exception):
    pass


def gauges():
    return [GaugeMetricFamily("answer", "what it is", 42)]


@asynccontextmanager
async def serving(collect=gauges):
    server = MetricsServer("127.0.0.1", 0, collect)
    host, _, port = (await server.start()).rpartition(":")
    try:
        yield host, int(port)
    finally:
        await server.stop()
        await server.stop()


async def ask(address, request: bytes) -> tuple[str, bytes]:
    """First line and body of the answer."""
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request)
        answer = await reader.read()
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.decode().split("\r\n")[0], body


@pytest.mark.parametrize("target", [b"/metrics", b"/metrics?x=1"])
async def test_a_scrape(target):
    async with serving() as address:
        status, body = await ask(address, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status == "HTTP/1.1 200 OK"
        assert body == b"# HELP answer what it is\n# TYPE answer gauge\nanswer 42.0\n"


async def test_a_head_has_no_body():
    async with serving() as address:
        assert await ask(address, b"HEAD /metrics HTTP/1.1\r\n\r\n") == ("HTTP/1.1 200 OK", b"")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
        (b"GET /metrics/../etc HTTP/1.1\r\n\r\n", "404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
        (b"hello\r\n\r\n", "400 Bad Request"),
        (b"\x00\xff\r\n\r\n", "400 Bad Request"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 2 * HEAD_BYTES + b"\r\n\r\n", "431 Request Header Fields Too Large"),
    ],
)
async def test_what_is_not_a_scrape_is_refused(request_bytes, status):
    async with serving() as address:
        assert (await ask(address, request_bytes))[0] == f"HTTP/1.1 {status}"
        assert (await ask(address, b"GET /metrics HTTP/1.0\r\n\r\n"))[0] == "HTTP/1.1 200 OK"


async def test_f8_a_fault_of_a_family_is_an_answer_and_the_next_scrape_goes_on():
    faults = iter([Broken("no"), None])

    def collect():
        fault = next(faults)
        if fault is not None:
            raise fault
        return gauges()

    async with serving(collect) as address:
        assert (await ask(address, b"GET /metrics HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 500 Internal Server Error"
        assert (await ask(address, b"GET /metrics HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 200 OK"


async def test_a_client_that_says_nothing_is_not_kept(monkeypatch):
    monkeypatch.setattr(metrics_server, "REQUEST_S", 0.05)
    async with serving() as address:
        assert await ask(address, b"GET /metr") == ("", b"")


async def test_an_answer_that_is_not_taken_in_time_is_not_kept(monkeypatch):
    monkeypatch.setattr(metrics_server, "REQUEST_S", 0.5)
    size = 32 << 20
    family = GaugeMetricFamily("answer", "x" * size, 42)
    server = MetricsServer("127.0.0.1", 0, lambda: [family])
    host, _, port = (await server.start()).rpartition(":")
    loop, taken = asyncio.get_running_loop(), 1
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, (host, int(port)))
        await loop.sock_sendall(client, b"GET /metrics HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(10):
            assert await loop.sock_recv(client, 1) == b"H"
            await asyncio.gather(*server._connections)
            while received := await loop.sock_recv(client, 1 << 20):
                taken += len(received)
    await server.stop()
    assert taken < size


async def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(metrics_server, "MAX_CONNECTIONS", 1)
    async with serving() as address:
        _, silent = await asyncio.open_connection(*address)
        silent.write(b"GET /")
        await silent.drain()
        refused = await ask(address, b"")
        assert refused == ("", b"")
        silent.close()


async def test_stopping_ends_open_connections():
    server = MetricsServer("127.0.0.1", 0, gauges)
    host, _, port = (await server.start()).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await server.stop()
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()
    with pytest.raises(OSError):
        await asyncio.open_connection(host, int(port))


async def test_a_port_in_use_is_named():
    async with serving() as (host, port):
        with pytest.raises(PortInUse, match=f"cannot listen on {host}:{port}: address already in use$"):
            await MetricsServer(host, port, gauges).start()
