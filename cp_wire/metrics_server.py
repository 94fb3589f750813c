"""Metrics over HTTP: one path, read by a scraper, on the process's own event loop.

No framework and no thread: a request is one line and headers that nobody reads, an answer is one text.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric

from cp_wire.errors import PortInUse
from cp_wire.host import join_address
from cp_wire.logs import get_logger
from cp_wire.serve import probe

PATH = "/metrics"
HEAD_BYTES = 8192
"""Of a request; more is refused."""
REQUEST_S = 5.0
"""From a connection's begin to its end."""
MAX_CONNECTIONS = 16
"""Further ones are closed at once."""

log = get_logger("metrics")


class MetricsServer:
    """Answers GET and HEAD of PATH with what `collect` says at that moment. port 0 lets the system choose.

    collect: called on the event loop; what it raises is logged and answered with 500.
    """

    def __init__(self, host: str, port: int, collect: Callable[[], Iterable[Metric]]) -> None:
        self._host, self._port = host, port
        self._collect = collect
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    def collect(self) -> Iterable[Metric]:
        """What is served now; makes this a collector of the client library."""
        return self._collect()

    async def start(self) -> str:
        """Listens and returns HOST:PORT; raises PortInUse."""
        if self._port:
            probe(self._host, self._port)
        try:
            self._server = await asyncio.start_server(self._serve, self._host, self._port, limit=HEAD_BYTES)
        except OSError as error:
            raise PortInUse(self._host, self._port, (error.strerror or str(error)).lower()) from error
        return join_address(self._host, self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stops listening and ends open connections. Idempotent."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if self._server is None or task is None or len(self._connections) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._connections.add(task)
        try:
            # A scraper that goes away, or says nothing, is nobody's concern.
            with suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError):
                async with asyncio.timeout(REQUEST_S):
                    writer.write(await self._answer(reader))
                    writer.close()
                    await writer.wait_closed()
        finally:
            self._connections.discard(task)
            # What is not taken in time would stay in memory for as long as its reader likes.
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        method, _, rest = head.split(b"\r\n", 1)[0].partition(b" ")
        path = rest.rpartition(b" ")[0].partition(b"?")[0].decode("latin-1")
        if not rest.rpartition(b" ")[2].startswith(b"HTTP/1."):
            return _response(HTTPStatus.BAD_REQUEST)
        if path != PATH:
            return _response(HTTPStatus.NOT_FOUND)
        if method not in (b"GET", b"HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED)
        try:
            text = generate_latest(self)
        except Exception as error:
            log.error("metrics can't be told", exc=error)
            return _response(HTTPStatus.INTERNAL_SERVER_ERROR)
        return _response(HTTPStatus.OK, text, with_body=method == b"GET")


def _response(status: HTTPStatus, text: bytes = b"", *, with_body: bool = True) -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {CONTENT_TYPE_PLAIN_0_0_4}",
        f"Content-Length: {len(text)}",
        "Connection: close",
    ]
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append("Allow: GET, HEAD")
    head = "\r\n".join([*lines, "", ""]).encode("ascii")
    return head + text if with_body else head
