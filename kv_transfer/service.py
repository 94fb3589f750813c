"""The gRPC face of a source."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from cp_wire import errors
from cp_wire.logs import get_logger
from cp_wire.pb import kv_transfer_pb2 as pb
from cp_wire.pb import kv_transfer_pb2_grpc
from kv_transfer.source import Fetch

log = get_logger("transfer")

SERVICE = "kvloom.v1.KvTransferService"

WRITE_S = 10.0
"""How long a reader may leave a message untaken: one that is frozen must not hold the stream for good."""


class Readable(Protocol):
    """What answers the calls: a `Source`, or what stands for one that may not be there yet."""

    def describe(self, request: pb.DescribeRequest) -> pb.DescribeResponse:
        """See `Source.describe`."""
        ...

    def renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        """See `Source.renew`."""
        ...

    def release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        """See `Source.release`."""
        ...

    def open(self, request: pb.FetchRequest) -> Fetch:
        """See `Source.open`."""
        ...


class KvTransferServicer(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """Answers for one rank. `Fetch` writes frames of `framing.encode`, not messages: see `add_to_server`."""

    def __init__(self, source: Readable, write_s: float = WRITE_S) -> None:
        self._source = source
        self._write_s = write_s

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
        """See `Source.describe`."""
        return await _answered(self._source.describe, request, context)

    async def Renew(self, request: pb.RenewRequest, context: grpc.aio.ServicerContext) -> pb.RenewResponse:
        """See `Source.renew`."""
        return await _answered(self._source.renew, request, context)

    async def Release(self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext) -> pb.ReleaseResponse:
        """See `Source.release`."""
        return await _answered(self._source.release, request, context)

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        """Packs a message while the one before it is on its way out; never further ahead."""
        try:
            await self._send_all(request, context)
        except TimeoutError:
            # The status waits behind the messages that nobody takes, until the reader moves or its connection is given up;
            # nothing of the pool is held meanwhile.
            await errors.abort(context, errors.DeadlineExceeded(f"no message was taken for {self._write_s} s"))
        except Exception as error:
            await _abort(error, request, context)

    async def _send_all(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        """TimeoutError when the reader does not take a message in time."""
        fetch = self._source.open(request)
        now = asyncio.get_running_loop().time
        async with asyncio.timeout(self._write_s) as patience:
            for position in range(len(fetch.messages)):
                await self.send(fetch.frame(position), context)
                patience.reschedule(now() + self._write_s)

    async def send(self, frame: bytes, context: grpc.aio.ServicerContext) -> None:
        """Writes one frame; returns when it is on its way."""
        await context.write(frame)


def add_to_server(servicer: KvTransferServicer, server: grpc.aio.Server) -> None:
    """Like the generated function, but `Fetch` passes its frames through as they are."""
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            getattr(servicer, name),
            request_deserializer=request.FromString,
            response_serializer=response.SerializeToString,
        )
        for name, request, response in (
            ("Describe", pb.DescribeRequest, pb.DescribeResponse),
            ("Renew", pb.RenewRequest, pb.RenewResponse),
            ("Release", pb.ReleaseRequest, pb.ReleaseResponse),
        )
    }
    handlers["Fetch"] = grpc.unary_stream_rpc_method_handler(
        servicer.Fetch, request_deserializer=pb.FetchRequest.FromString, response_serializer=None
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


async def _answered(call: Callable[[Any], Any], request: Any, context: grpc.aio.ServicerContext) -> Any:
    try:
        return call(request)
    except Exception as error:
        return await _abort(error, request, context)


async def _abort(error: Exception, request: Any, context: grpc.aio.ServicerContext) -> None:
    if not isinstance(error, errors.KvloomError):
        log.error("transfer call failed", exc=error, session=request.session)
    await errors.abort(context, error)
