"""What the worker thread says while it runs a command, on the event loop."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any


class Said:
    """Iterates over what a command tells before its end, in order; `result` is there when the iteration is over."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._told: asyncio.Queue[tuple[Any, int] | None] = asyncio.Queue()
        self._future: Future[tuple[Any, int]] | None = None
        self._before_us = 0

    def more(self, result: Any | None, worker_us: int) -> None:
        """From the worker thread: a result before the last, None = there is nothing to tell, and the time it took."""
        self._before_us += worker_us
        if result is not None:
            self._tell((result, worker_us))

    def last(self, future: "Future[tuple[Any, int]]") -> None:
        """The command's end, as the worker promised it."""
        self._future = future
        future.add_done_callback(lambda _: self._tell(None))

    def result(self) -> tuple[Any, int]:
        """What the command returned, and its microseconds without those of the results before; raises what it raised."""
        assert self._future is not None
        result, worker_us = self._future.result(0)
        return result, worker_us - self._before_us

    async def __aiter__(self) -> AsyncIterator[tuple[Any, int]]:
        while (told := await self._told.get()) is not None:
            yield told

    def _tell(self, told: tuple[Any, int] | None) -> None:
        # A process that exits no longer listens.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._told.put_nowait, told)
