"""The ordered command stream to one rank."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from coordinator.faults import CommandFailed, CommandTimedOut, LaneClosed
from cp_wire.pb import rank_pb2, rank_pb2_grpc

RESULT_OF = {
    "configure": "configured",
    "allocate_pool": "pool_allocated",
    "prepare_group": "group_prepared",
    "measure_group": "group_measured",
    "open_group": "group_opened",
    "step": "step",
    "reset": "reset_done",
}
"""Command → the result that answers it."""


@dataclass(slots=True)
class _Sent:
    kind: str
    operation: str
    """The command in words for clients."""
    epoch: int
    stall_limit_s: float | None
    answer: "asyncio.Future[rank_pb2.ExecuteResponse]"
    on_more: Callable[[rank_pb2.ExecuteResponse], None] | None


class Lane:
    """Commands 1, 2, 3, … to one life of a rank; answers are matched by sequence.

    An answer with another instance, epoch, sequence or kind than the command's closes the lane: the two sides no longer
    agree on what happened. However the lane ends, `on_closed(reason)` is called exactly once, after every waiting
    command has failed with `LaneClosed`.
    """

    def __init__(self, rank: int, instance: str, stub: rank_pb2_grpc.RankServiceStub, on_closed: Callable[[str], None]) -> None:
        self.rank, self.instance = rank, instance
        self.epoch = 0
        self._on_closed = on_closed
        self._sequence = 0
        self._sent: dict[int, _Sent] = {}
        self._closed_reason: str | None = None
        self._outbox: asyncio.Queue[rank_pb2.ExecuteRequest] = asyncio.Queue()
        self._stub = stub
        self._calls: set[grpc.aio.Call] = set()
        """Calls beside the stream that are under way."""
        self._call: Any = stub.Execute()
        self._tasks = (asyncio.create_task(self._write()), asyncio.create_task(self._read()))

    def submit(
        self,
        kind: str,
        command: Any,
        stall_limit_s: float | None,
        on_more: Callable[[rank_pb2.ExecuteResponse], None] | None = None,
    ) -> "asyncio.Future[rank_pb2.ExecuteResponse]":
        """Queues a command under the lane's current epoch; the future ends with the answer, `CommandFailed` or `LaneClosed`.

        stall_limit_s: how long the rank may be without progress while it runs this command; None = any time. on_more: takes
        what the rank says before it answers; None = it may say nothing.
        """
        answer: asyncio.Future[rank_pb2.ExecuteResponse] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_notice)
        if self._closed_reason is not None:
            answer.set_exception(LaneClosed(self.rank, self._closed_reason))
            return answer
        self._sequence += 1
        self._sent[self._sequence] = _Sent(kind, _operation(kind, command), self.epoch, stall_limit_s, answer, on_more)
        self._outbox.put_nowait(
            rank_pb2.ExecuteRequest(sequence=self._sequence, epoch=self.epoch, instance=self.instance, **{kind: command})
        )
        return answer

    async def send(
        self, kind: str, command: Any, timeout_s: float, stall_limit_s: float | None = None
    ) -> rank_pb2.ExecuteResponse:
        """`submit` and wait; `CommandTimedOut` after timeout_s."""
        try:
            return await asyncio.wait_for(self.submit(kind, command, stall_limit_s), timeout_s)
        except TimeoutError:
            raise CommandTimedOut(self.rank, f"no answer to {kind} within {timeout_s:g} s") from None

    def end_run(self, ticket: int, timeout_s: float) -> None:
        """Asks the rank to end a run of steps. Whatever becomes of the call: the run ends by itself, or with the lane."""
        if self._closed_reason is not None:
            return
        request = rank_pb2.EndRunRequest(instance=self.instance, epoch=self.epoch, ticket=ticket)
        call = self._stub.EndRun(request, timeout=timeout_s)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def stall_limit_s(self, sequence: int) -> float | None:
        """How long the rank may be without progress while it runs the command; None when that is unknown or unlimited."""
        sent = self._sent.get(sequence)
        return None if sent is None else sent.stall_limit_s

    def tolerate_stalls(self, limit_s: float) -> None:
        """Raises the limits of everything sent so far: a survivor may have to sit out a collective with a lost member."""
        for sent in self._sent.values():
            if sent.stall_limit_s is not None:
                sent.stall_limit_s = max(sent.stall_limit_s, limit_s)

    def close(self, reason: str) -> None:
        """Ends the lane from this side; the rank exits. Idempotent."""
        if self._closed_reason is not None:
            return
        self._closed_reason = reason
        self._call.cancel()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        sent, self._sent = self._sent, {}
        for command in sent.values():
            if not command.answer.done():
                command.answer.set_exception(LaneClosed(self.rank, reason))
        self._on_closed(reason)

    async def _write(self) -> None:
        try:
            while True:
                await self._call.write(await self._outbox.get())
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            self.close(_why(error))

    async def _read(self) -> None:
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self._take(response)
            self.close("its lane ended")
        except grpc.RpcError as error:
            self.close(_why(error))

    def _take(self, response: rank_pb2.ExecuteResponse) -> None:
        sent = self._sent.get(response.sequence)
        if sent is not None and not response.more:
            del self._sent[response.sequence]
        if sent is None:
            self.close(f"it answered command {response.sequence}, which is not open")
        elif response.instance != self.instance or response.epoch != sent.epoch:
            sent.answer.cancel()
            self.close(f"it answered {sent.kind} of epoch {sent.epoch} for another instance or epoch {response.epoch}")
        elif sent.answer.done():
            return
        elif response.more and sent.on_more is not None and response.WhichOneof("result") == RESULT_OF[sent.kind]:
            sent.on_more(response)
        elif response.more:
            sent.answer.cancel()
            self.close(f"it has not ended {sent.kind} with what it says")
        elif response.WhichOneof("result") == "error":
            sent.answer.set_exception(CommandFailed(self.rank, sent.operation, response.error.reason, response.error.message))
        elif response.WhichOneof("result") == RESULT_OF[sent.kind]:
            sent.answer.set_result(response)
        else:
            sent.answer.cancel()
            self.close(f"it answered {sent.kind} with {response.WhichOneof('result')}")


def _notice(answer: "asyncio.Future[rank_pb2.ExecuteResponse]") -> None:
    """Whoever was to wait for it may have been cancelled before; that a lane has ended is told in other ways too."""
    if not answer.cancelled():
        answer.exception()


def _operation(kind: str, command: Any) -> str:
    return f"{kind} {command.group}" if kind in ("prepare_group", "open_group", "measure_group") else kind


def _why(error: Exception) -> str:
    """The status alone: a status text may hold addresses."""
    return f"its lane broke ({error.code().name})" if isinstance(error, grpc.aio.AioRpcError) else "its lane broke"
