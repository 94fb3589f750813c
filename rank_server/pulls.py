"""One pull per session at a time, and none after its end."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from cp_wire.errors import Stale
from kv_transfer.pull import Report

REMEMBERED = 4096
"""Ended sessions that a late call is still refused for."""


class Pulls:
    """The running pulls of one rank. Belongs to one event loop.

    `end`, `end_all` and a call that replaces another wait until nothing is written any more.
    """

    def __init__(self) -> None:
        self._running: dict[int, asyncio.Task[Report]] = {}
        self._newest: dict[int, int] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()

    @property
    def sessions(self) -> int:
        """Sessions that have pulled and are not over."""
        return len(self._newest)

    async def run(self, session: int, attempt: int, pull: Callable[[], Coroutine[Any, Any, Report]]) -> Report:
        """Runs pull() once nothing older of the session writes; raises what it raises.

        `Stale` for an attempt that is not newer than all before it, and for one that is replaced or ended. Cancelling the call
        cancels the pull.
        """
        if session in self._ended:
            raise Stale(f"transfer {session} is over on this rank")
        if attempt <= self._newest.get(session, 0):
            raise Stale(f"attempt {attempt} of transfer {session} comes after attempt {self._newest[session]}")
        self._newest[session] = attempt
        await self._halt(session)
        if self._newest.get(session) != attempt:
            raise Stale(f"attempt {attempt} of transfer {session} was stopped before it began")
        task = self._running[session] = asyncio.create_task(pull())
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise Stale(f"attempt {attempt} of transfer {session} was stopped") from None
        finally:
            if self._running.get(session) is task:
                del self._running[session]

    async def end(self, session: int) -> None:
        """The session pulls no more, now or later. Idempotent."""
        self._newest.pop(session, None)
        self._ended[session] = None
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        await self._halt(session)

    async def end_all(self) -> None:
        """Every session that has pulled is over."""
        await asyncio.gather(*(self.end(session) for session in list(self._newest)))

    async def _halt(self, session: int) -> None:
        while (task := self._running.get(session)) is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
