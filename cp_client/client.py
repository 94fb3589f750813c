"""The blocking client; one instance may be used from several threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, Unpack

from cp_client.events import Completion, Event, Reader, join
from cp_client.request import DRAIN_MARGIN_S, GENERATE_TIMEOUT_S, UNARY_TIMEOUT_S, Options, generate_request
from cp_client.unanswered import error_of
from cp_wire.channels import open_sync_channel
from cp_wire.errors import RpcError
from cp_wire.pb import common_pb2, coordinator_pb2, coordinator_pb2_grpc


class Stream:
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
        self._closed = False

    @property
    def request_id(self) -> str:
        """Id of the request; empty until the server has accepted it."""
        return self._reader.request_id

    @property
    def seed(self) -> int:
        """Seed of the draws, chosen by the server if none was given."""
        return self._reader.seed

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        event = None
        try:
            while event is None:
                event = self._reader.read(next(self._call))
        except StopIteration:
            if not self._closed:
                self._reader.end()
            raise
        except RpcError as error:
            if self._closed:
                raise StopIteration from None
            raise error_of(error, self._target, self._timeout, begun=bool(self._reader.request_id)) from None
        return event

    def close(self) -> None:
        """Ends the request unless it has ended; also from another thread than the reader's."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        # A `for` loop that is left early drops the last reference: the server must not go on.
        call = getattr(self, "_call", None)
        if call is not None:
            call.cancel()


class Client:
    """Talks to the coordinator at `target` (HOST:PORT); close it, or use `with`.

    All methods raise the errors of `cp_client.errors`. Nothing is retried: `error.retryable` says whether that helps.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._channel = open_sync_channel(target, "prompt")
        self._inference = coordinator_pb2_grpc.InferenceServiceStub(self._channel)
        self._control = coordinator_pb2_grpc.ControlServiceStub(self._channel)

    def generate(self, prompt: str | None = None, *, timeout: float = GENERATE_TIMEOUT_S, **options: Unpack[Options]) -> Stream:
        """Sends a request and returns the stream of its events; keywords as in `cp_client.request.Options`.

        `timeout` in seconds bounds the whole request.
        """
        return Stream(self._inference, generate_request(prompt, **options), self._target, timeout)

    def complete(
        self, prompt: str | None = None, *, timeout: float = GENERATE_TIMEOUT_S, **options: Unpack[Options]
    ) -> Completion:
        """The whole answer at once."""
        with self.generate(prompt, timeout=timeout, **options) as stream:
            return join(list(stream), stream.seed)

    def abort(self, request_id: str, *, timeout: float = UNARY_TIMEOUT_S) -> None:
        """Ends an active request; its stream ends with finish reason `abort`."""
        with self._typed_errors(timeout):
            self._inference.Abort(coordinator_pb2.AbortRequest(request_id=request_id), timeout=timeout)

    def status(self, *, last_steps: int = 0, timeout: float = UNARY_TIMEOUT_S) -> coordinator_pb2.GetStatusResponse:
        """Ranks, groups, queue lengths and the effective configuration.

        last_steps: how many steps of each set the step times are taken over, 0 = all that are remembered.
        """
        with self._typed_errors(timeout):
            return self._control.GetStatus(coordinator_pb2.GetStatusRequest(last_steps=last_steps), timeout=timeout)

    def config(self, *, timeout: float = UNARY_TIMEOUT_S) -> common_pb2.ClusterConfig:
        """The effective configuration: what was asked for, with everything settled that was left open."""
        with self._typed_errors(timeout):
            return self._control.GetConfig(coordinator_pb2.GetConfigRequest(), timeout=timeout).config

    def drain(self, deadline_s: float = 30.0) -> int:
        """Stops admission, waits up to `deadline_s` for the accepted requests; returns how many were ended early."""
        request = coordinator_pb2.DrainRequest(deadline_ms=round(deadline_s * 1000))
        timeout = deadline_s + DRAIN_MARGIN_S
        with self._typed_errors(timeout):
            return self._control.Drain(request, timeout=timeout).ended

    def close(self) -> None:
        """Cancels what is running and closes the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def _typed_errors(self, timeout: float) -> Iterator[None]:
        try:
            yield
        except RpcError as error:
            raise error_of(error, self._target, timeout) from None
