"""Asking ranks until they have done what nobody can do without."""

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter

from coordinator.rank_link import RankLink
from coordinator.timings import Timings


async def insist(
    ask: Callable[[], Awaitable[list[RankLink]]],
    fence: Callable[[RankLink, str], None],
    matters: Callable[[], bool],
    timings: Timings,
) -> None:
    """Asks until all ranks have ended their part of a transfer, or it matters no more.

    ask: returns those that have not. One that is silent for `pull_s` seconds is fenced: its blocks would never be free again.
    """
    until = perf_counter() + timings.pull_s
    while (silent := await ask()) and matters():
        if perf_counter() >= until:
            for link in silent:
                fence(link, f"it has not ended a transfer for {timings.pull_s:g} s")
        await asyncio.sleep(timings.retry_s)
