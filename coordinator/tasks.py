"""Background tasks whose end never goes unnoticed."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from cp_wire.logs import get_logger

log = get_logger("coordinator")
T = TypeVar("T")


class Background:
    """Holds references to running tasks; an exception in one is logged and handed to `on_failure`."""

    def __init__(self, on_failure: Callable[[str, Exception], None]) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> "asyncio.Task[Any]":
        """Starts a task."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def cancel(self) -> None:
        """Cancels all tasks and waits for their end."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            log.error("background task failed", exc=error, task=task.get_name())
            self._on_failure(task.get_name(), error)


async def all_or_first_error(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all at once; results in order, or the first exception, with the rest cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Changes:
    """A counter that others can wait on; several changes before a waiter runs count as one."""

    def __init__(self) -> None:
        self.version = 0
        self._event = asyncio.Event()

    def announce(self) -> None:
        """Something has changed."""
        self.version += 1
        self._event.set()
        self._event = asyncio.Event()

    async def beyond(self, version: int) -> int:
        """The version, once it is above the given one."""
        while self.version <= version:
            await self._event.wait()
        return self.version
