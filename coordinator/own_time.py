"""Time as this process lived it: on a starved host the coordinator sleeps longer than it asked for, and so do its ranks.

A rank that was silent while we were held up ourselves is not frozen for that reason.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time, in seconds. held_up_s: the part of wall_s by which waits in it ended late."""

    wall_s: float = 0.0
    held_up_s: float = 0.0

    def __add__(self, other: "Span") -> "Span":
        return Span(self.wall_s + other.wall_s, self.held_up_s + other.held_up_s)

    def counted_s(self, forgiven_s: float) -> float:
        """What counts against a rank: all but the time we were held up, of which at most forgiven_s are forgiven."""
        return self.wall_s - min(self.held_up_s, forgiven_s)


def waited(asked_s: float, took_s: float) -> Span:
    """A wait that was to end after asked_s at the latest and took took_s."""
    return Span(took_s, max(0.0, took_s - asked_s))


def stall(before: Span, since: Span, age_s: float) -> Span:
    """How long a worker has been without progress, age_s seconds by the rank's clock.

    before: the stall at the rank's previous answer. since: from that answer to this one.
    """
    whole = since if age_s < since.wall_s else before + since
    return Span(age_s, min(age_s, whole.held_up_s))


Wait = Callable[["asyncio.Future[Any] | None", float], Awaitable[Span]]


async def wait(future: "asyncio.Future[Any] | None", seconds: float) -> Span:
    """Until the future is done, `seconds` at most; None = the whole time."""
    start = perf_counter()
    if future is None:
        await asyncio.sleep(seconds)
    else:
        await asyncio.wait({future}, timeout=seconds)
    return waited(seconds, perf_counter() - start)


async def wait_out(future: "asyncio.Future[Any]", limit_s: float, look_s: float, forgiven_s: float, wait: Wait = wait) -> Span:
    """Until the future is done, or until limit_s of the wait count; returns how long that was. A look is taken every look_s."""
    span = Span()
    while not future.done() and span.counted_s(forgiven_s) < limit_s:
        span += await wait(future, look_s)
    return span
