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

    def more(self, result: Any, worker_us: int) -> None:
        """From the worker thread: a result before the last."""
        self._tell((result, worker_us))

    def last(self, future: "Future[tuple[Any, int]]") -> None:
        """The command's end, as the worker promised it."""
        self._future = future
        future.add_done_callback(lambda _: self._tell(None))

    def result(self) -> tuple[Any, int]:
        """What the command returned, and its microseconds; raises what it raised."""
        assert self._future is not None
        return self._future.result(0)

    async def __aiter__(self) -> AsyncIterator[tuple[Any, int]]:
        while (told := await self._told.get()) is not None:
            yield told

    def _tell(self, told: tuple[Any, int] | None) -> None:
        # A process that exits no longer listens.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._told.put_nowait, told)
