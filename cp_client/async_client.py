"""The client for one event loop."""

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Self, TypeVar, Unpack

from cp_client.events import Completion, Event, Reader, join
from cp_client.request import DRAIN_MARGIN_S, GENERATE_TIMEOUT_S, UNARY_TIMEOUT_S, Options, generate_request
from cp_client.unanswered import error_of
from cp_wire.channels import open_channel
from cp_wire.errors import Cancelled, RpcError
from cp_wire.pb import common_pb2, coordinator_pb2, coordinator_pb2_grpc

T = TypeVar("T")


class AsyncStream:
    """Events of one request, in order; the last one has a `finish_reason`. Closing it early cancels the request."""

    def __init__(
        self,
        stub: coordinator_pb2_grpc.InferenceServiceStub,
        request: coordinator_pb2.GenerateRequest,
        target: str,
        timeout: float,
    ) -> None:
        self._target, self._timeout = target, timeout
        self._reader = Reader()
        self._call = stub.Generate(request, timeout=timeout)
        self._responses = aiter(self._call)
        self._closed = False

    @property
    def request_id(self) -> str:
        """Id of the request; empty until the server has accepted it."""
        return self._reader.request_id

    @property
    def seed(self) -> int:
        """Seed of the draws, chosen by the server if none was given."""
        return self._reader.seed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = None
        try:
            while event is None:
                event = self._reader.read(await anext(self._responses))
        except StopAsyncIteration:
            if not self._closed:
                self._reader.end()
            raise
        except asyncio.CancelledError:
            if _this_task_is_cancelled():
                raise
            if self._closed:
                raise StopAsyncIteration from None
            raise Cancelled("the client was closed") from None
        except RpcError as error:
            raise error_of(error, self._target, self._timeout, begun=bool(self._reader.request_id)) from None
        return event

    async def aclose(self) -> None:
        """Ends the request unless it has ended."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncClient:
    """Talks to the coordinator at `target` (HOST:PORT) from the running event loop; close it, or use `async with`.

    All methods raise the errors of `cp_client.errors`. Nothing is retried: `error.retryable` says whether that helps.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._channel = open_channel(target, "prompt")
        self._inference = coordinator_pb2_grpc.InferenceServiceStub(self._channel)
        self._control = coordinator_pb2_grpc.ControlServiceStub(self._channel)

    def generate(
        self, prompt: str | None = None, *, timeout: float = GENERATE_TIMEOUT_S, **options: Unpack[Options]
    ) -> AsyncStream:
        """Sends a request and returns the stream of its events; keywords as in `cp_client.request.Options`.

        `timeout` in seconds bounds the whole request.
        """
        return AsyncStream(self._inference, generate_request(prompt, **options), self._target, timeout)

    async def complete(
        self, prompt: str | None = None, *, timeout: float = GENERATE_TIMEOUT_S, **options: Unpack[Options]
    ) -> Completion:
        """The whole answer at once."""
        async with self.generate(prompt, timeout=timeout, **options) as stream:
            return join([event async for event in stream], stream.seed)

    async def abort(self, request_id: str, *, timeout: float = UNARY_TIMEOUT_S) -> None:
        """Ends an active request; its stream ends with finish reason `abort`."""
        call = self._inference.Abort(coordinator_pb2.AbortRequest(request_id=request_id), timeout=timeout)
        await self._answer(call, timeout)

    async def status(self, *, last_steps: int = 0, timeout: float = UNARY_TIMEOUT_S) -> coordinator_pb2.GetStatusResponse:
        """Ranks, groups, queue lengths and the effective configuration; see `Client.status`."""
        request = coordinator_pb2.GetStatusRequest(last_steps=last_steps)
        return await self._answer(self._control.GetStatus(request, timeout=timeout), timeout)

    async def config(self, *, timeout: float = UNARY_TIMEOUT_S) -> common_pb2.ClusterConfig:
        """The effective configuration; see `Client.config`."""
        call = self._control.GetConfig(coordinator_pb2.GetConfigRequest(), timeout=timeout)
        return (await self._answer(call, timeout)).config

    async def drain(self, deadline_s: float = 30.0) -> int:
        """Stops admission, waits up to `deadline_s` for the accepted requests; returns how many were ended early."""
        request = coordinator_pb2.DrainRequest(deadline_ms=round(deadline_s * 1000))
        timeout = deadline_s + DRAIN_MARGIN_S
        return (await self._answer(self._control.Drain(request, timeout=timeout), timeout)).ended

    async def close(self) -> None:
        """Cancels what is running and closes the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _answer(self, call: Awaitable[T], timeout: float) -> T:
        try:
            return await call
        except asyncio.CancelledError:
            if _this_task_is_cancelled():
                raise
            raise Cancelled("the client was closed") from None
        except RpcError as error:
            raise error_of(error, self._target, timeout) from None


def _this_task_is_cancelled() -> bool:
    """gRPC raises CancelledError also for a call that was cancelled from elsewhere; only the task knows the difference."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
