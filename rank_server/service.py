"""The rank's gRPC face: the lane, the progress report, the calls about KV that moves. Never computes; hands commands to the
worker."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from cp_layout.errors import LayoutError
from cp_wire import errors
from cp_wire.host_memory import PoolRefused
from cp_wire.logs import get_logger
from cp_wire.pb import rank_pb2, rank_pb2_grpc
from model_files import ModelRefused
from rank_server.collectives.base import CollectiveError
from rank_server.executor import Executor
from rank_server.models.weights import WeightError
from rank_server.runs import EVERY_TICKET
from rank_server.said import Said
from rank_server.sequences import PlanRefused
from rank_server.transfer import Transfers
from rank_server.worker import Worker

log = get_logger("rank")

Request = TypeVar(
    "Request",
    rank_pb2.EndRunRequest,
    rank_pb2.LeaseRequest,
    rank_pb2.EndLeaseRequest,
    rank_pb2.PullRequest,
    rank_pb2.EndPullRequest,
)
Response = TypeVar("Response")

_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (PlanRefused, "PLAN_REFUSED"),
    (PoolRefused, "POOL_REFUSED"),
    (errors.ConfigRefused, "CONFIG_REFUSED"),
    (WeightError, "MODEL_REFUSED"),
    (ModelRefused, "MODEL_REFUSED"),
    (LayoutError, "CONFIG_REFUSED"),
    (CollectiveError, "COLLECTIVE_FAILED"),
    (MemoryError, "OUT_OF_MEMORY"),
)


def command_error(error: BaseException) -> rank_pb2.CommandError:
    """The wire form of a failed command: a stable reason and one sentence."""
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return rank_pb2.CommandError(reason=reason, message=str(error))
    return rank_pb2.CommandError(reason="INTERNAL", message=f"{type(error).__name__}: {error}")


class RankServicer(rank_pb2_grpc.RankServiceServicer):
    """One lane over the life of the process: when it closes, `lane_closed` is set and the process is to exit.

    `end_lane` is for a process that exits for another reason.
    """

    def __init__(self, executor: Executor, worker: Worker, transfers: Transfers, rank: int, instance: str) -> None:
        self._executor = executor
        self._worker = worker
        self._transfers = transfers
        self._rank = rank
        self._instance = instance
        self._epoch = 0
        self._lane: asyncio.Task[Any] | None = None
        self._stopping = False
        self.lane_opened = asyncio.Event()
        self.lane_closed = asyncio.Event()

    async def Execute(
        self, request_iterator: AsyncIterator[rank_pb2.ExecuteRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """Commands in, results out, in order; a run of steps has several results."""
        if self._stopping:
            await errors.abort(context, errors.Unavailable(f"rank {self._rank} is stopping"))
        if self._lane is not None:
            await errors.abort(context, errors.ConfigRefused(f"rank {self._rank} already has a lane"))
        self._lane = asyncio.current_task()
        self.lane_opened.set()
        try:
            sequence = 0
            async for request in request_iterator:
                sequence += 1
                if request.sequence != sequence:
                    await errors.abort(
                        context, errors.ConfigRefused(f"rank {self._rank} expected command {sequence}, got {request.sequence}")
                    )
                async with aclosing(self._answers(request)) as answers:
                    async for response in answers:
                        await context.write(response)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        finally:
            self.lane_closed.set()

    def end_lane(self) -> None:
        """Ends the lane with status OK, whatever the worker does: no further command is run, no further answer is sent.

        A coordinator that is writing a command at that moment may see a broken call instead.
        """
        self._stopping = True
        self._executor.end_run(EVERY_TICKET)
        if self._lane is not None and not self.lane_closed.is_set():
            self._lane.cancel()

    async def GetProgress(
        self, request: rank_pb2.GetProgressRequest, context: grpc.aio.ServicerContext
    ) -> rank_pb2.GetProgressResponse:
        """Answered at once, whatever the worker does."""
        progress = self._worker.progress()
        return rank_pb2.GetProgressResponse(
            instance=self._instance,
            rank=self._rank,
            running_sequence=progress.running_sequence,
            last_progress_ms=int(progress.last_progress_s * 1000),
            commands_done=progress.commands_done,
            load_fraction=self._executor.load_fraction,
        )

    async def EndRun(self, request: rank_pb2.EndRunRequest, context: grpc.aio.ServicerContext) -> rank_pb2.EndRunResponse:
        """See `Executor.end_run`."""

        async def end(request: rank_pb2.EndRunRequest) -> rank_pb2.EndRunResponse:
            self._executor.end_run(request.ticket)
            return rank_pb2.EndRunResponse()

        return await self._beside(end, request, context)

    async def Lease(self, request: rank_pb2.LeaseRequest, context: grpc.aio.ServicerContext) -> rank_pb2.LeaseResponse:
        """See `Transfers.lease`."""
        return await self._beside(self._transfers.lease, request, context)

    async def EndLease(self, request: rank_pb2.EndLeaseRequest, context: grpc.aio.ServicerContext) -> rank_pb2.EndLeaseResponse:
        """See `Transfers.end_lease`."""
        return await self._beside(self._transfers.end_lease, request, context)

    async def Pull(self, request: rank_pb2.PullRequest, context: grpc.aio.ServicerContext) -> rank_pb2.PullResponse:
        """See `Transfers.pull`."""
        return await self._beside(self._transfers.pull, request, context)

    async def EndPull(self, request: rank_pb2.EndPullRequest, context: grpc.aio.ServicerContext) -> rank_pb2.EndPullResponse:
        """See `Transfers.end_pull`."""
        return await self._beside(self._transfers.end_pull, request, context)

    async def _beside(
        self, call: Callable[[Request], Awaitable[Response]], request: Request, context: grpc.aio.ServicerContext
    ) -> Response:
        """The answer to a call that runs beside the lane, if it means this process and its present epoch."""
        try:
            if request.instance != self._instance:
                raise errors.Stale(f"the call is for instance {request.instance!r}, this is {self._instance!r}")
            if request.epoch != self._epoch:
                raise errors.Stale(f"the call is of epoch {request.epoch}, rank {self._rank} is at epoch {self._epoch}")
            return await call(request)
        except Exception as error:
            if not isinstance(error, errors.KvloomError):
                log.error("call failed", exc=error, call=type(request).__name__, session=getattr(request, "session", None))
            await errors.abort(context, error)

    async def _answers(self, request: rank_pb2.ExecuteRequest) -> AsyncGenerator[rank_pb2.ExecuteResponse, None]:
        """The answer to a command, and before it what a run of steps tells on its way."""
        kind = request.WhichOneof("command")
        refusal = self._refusal(request, kind)
        if refusal is not None:
            yield self._response(request, error=rank_pb2.CommandError(reason="PLAN_REFUSED", message=refusal))
            return
        self._epoch = request.epoch
        try:
            if kind == "reset":
                await self._transfers.reset()
            elif kind == "step":
                self._transfers.stamp(request.step)
            said = Said(asyncio.get_running_loop())
            field, command = self._command(request, kind, said)
            said.last(self._worker.submit(request.sequence, command))
            async for step, worker_us in said:
                yield self._response(request, worker_us=worker_us, more=True, step=step)
            result, worker_us = said.result()
            answer = self._response(request, worker_us=worker_us, **{field: result})
        except Exception as error:
            if not isinstance(error, tuple(kind for kind, _ in _REASONS)):
                log.error("command failed", exc=error, command=kind)
            answer = self._response(request, error=command_error(error))
        yield answer

    def _response(self, request: rank_pb2.ExecuteRequest, **fields: Any) -> rank_pb2.ExecuteResponse:
        return rank_pb2.ExecuteResponse(sequence=request.sequence, instance=self._instance, epoch=request.epoch, **fields)

    def _refusal(self, request: rank_pb2.ExecuteRequest, kind: str | None) -> str | None:
        if kind is None:
            return "the command is unknown to this version"
        if request.instance != self._instance:
            return f"command for instance {request.instance!r}, this is {self._instance!r}"
        if request.epoch < self._epoch:
            return f"command of epoch {request.epoch}, the rank is at epoch {self._epoch}"
        if request.epoch > self._epoch and kind not in ("reset", "configure"):
            return f"epoch {request.epoch} must start with a reset, got {kind} at epoch {self._epoch}"
        return None

    def _command(self, request: rank_pb2.ExecuteRequest, kind: str | None, said: Said) -> tuple[str, Callable[[], Any]]:
        executor = self._executor
        match kind:
            case "configure":
                configure = request.configure
                return "configured", lambda: executor.configure(
                    configure.config,
                    configure.rank,
                    configure.pool_is_settled,
                    first_rank=configure.first_rank,
                    pool_is_shared=configure.pool_is_shared,
                )
            case "allocate_pool":
                return "pool_allocated", lambda: executor.allocate_pool(request.allocate_pool.num_blocks)
            case "prepare_group":
                prepare = request.prepare_group
                return "group_prepared", lambda: executor.prepare_group(prepare.group, list(prepare.ranks))
            case "open_group":
                opened = request.open_group
                return "group_opened", lambda: executor.open_group(
                    opened.group, list(opened.ranks), opened.bootstrap, opened.timeout_ms / 1000
                )
            case "measure_group":
                asked = request.measure_group
                return "group_measured", lambda: executor.measure_group(
                    asked.group, asked.payload_bytes, asked.repeats, asked.timeout_ms / 1000
                )
            case "reset":
                return "reset_done", executor.reset
            case _:
                return "step", lambda: executor.run(request.step, said.more)
