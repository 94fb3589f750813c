"""Channels to other ranks: kept while they are of use, as opening one costs more than a small transfer."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio

from cp_wire.channels import open_channel

IDLE_S = 60.0
"""A channel that nobody has used for so long, at most twice as long, is closed: its peer may be gone for good, and a new life
of it mostly has another address."""


class Channels:
    """At most one channel per address. Belongs to one event loop; looks for idle ones by itself while there are any."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._open: dict[str, grpc.aio.Channel] = {}
        self._users: Counter[str] = Counter()
        self._used: set[str] = set()
        """Since the last look."""
        self._watching: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def use(self, address: str) -> Iterator[grpc.aio.Channel]:
        """The channel to HOST:PORT; it stays open for as long as the context lasts, `close` excepted."""
        if address not in self._open:
            self._open[address] = open_channel(address, "data")
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        self._users[address] += 1
        try:
            yield self._open[address]
        finally:
            self._users[address] -= 1
            self._used.add(address)

    async def close(self) -> None:
        """Closes all of them, those in use too."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        channels, self._open = list(self._open.values()), {}
        for channel in channels:
            await channel.close()

    async def _watch(self) -> None:
        while self._open:
            await asyncio.sleep(self._idle_s)
            used, self._used = self._used, set()
            idle = [address for address in self._open if not self._users[address] and address not in used]
            for channel in [self._open.pop(address) for address in idle]:
                await channel.close()
            self._users = +self._users
