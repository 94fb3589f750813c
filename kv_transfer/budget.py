"""A bound on bytes that several tasks share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Budget:
    """At most `total` bytes are held at any time; whoever wants more than that alone gets all of it. First come, first served.

    Belongs to one event loop.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._held = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Condition()

    @property
    def held(self) -> int:
        """Bytes held now."""
        return self._held

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Holds `size` bytes; waits until they are free."""
        size = min(size, self._total)
        async with self._turn, self._freed:
            await self._freed.wait_for(lambda: self._held + size <= self._total)
            self._held += size
        try:
            yield
        finally:
            self._held -= size
            async with self._freed:
                self._freed.notify_all()
