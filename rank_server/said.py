"""What the worker thread says while it runs a command, on the event loop."""

import asyncio
from concurrent.futures import Future
from typing import Any

from cp_wire.pb import rank_pb2


class Said:
    """Iterates over what a command tells before its end, in order; `result` is there when the iteration is over."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._told: asyncio.Queue[tuple[rank_pb2.StepResult, int] | None] = asyncio.Queue()
        self._future: Future[tuple[Any, int]] | None = None
        self._before_us = 0

    def more(self, result: rank_pb2.StepResult | None, worker_us: int) -> None:
        """From the worker thread: a result before the last, None when there is nothing to tell, and the microseconds since the
        one before it."""
        self._before_us += worker_us
        if result is not None:
            self._tell((result, worker_us))

    def last(self, future: "Future[tuple[Any, int]]") -> None:
        """The command's end, as the worker promised it."""
        self._future = future
        future.add_done_callback(lambda _: self._tell(None))

    def result(self) -> tuple[Any, int]:
        """What the command returned, and its microseconds since the last `more`; raises what it raised."""
        assert self._future is not None
        result, worker_us = self._future.result(0)
        return result, worker_us - self._before_us

    def __aiter__(self) -> "Said":
        return self

    async def __anext__(self) -> tuple[rank_pb2.StepResult, int]:
        told = await self._told.get()
        if told is None:
            raise StopAsyncIteration
        return told

    def _tell(self, told: tuple[rank_pb2.StepResult, int] | None) -> None:
        # A process that exits no longer listens.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._told.put_nowait, told)
