"""Pools of other processes that this one has mapped: kept while their owners live, as mapping anew costs more than copying."""

import asyncio

from cp_wire.pb import kv_transfer_pb2 as pb
from kv_transfer.shared_memory import Bytes, MappedPool, open_pool

WATCH_S = 1.0
"""How often the owners are looked at. A mapping keeps the memory of a dead one for so long, and no longer."""


class OpenPools:
    """Belongs to one event loop. Its watch runs by itself, as long as anything is mapped."""

    def __init__(self, watch_s: float = WATCH_S) -> None:
        self._watch_s = watch_s
        self._mapped: dict[bytes, MappedPool] = {}
        self._watching: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._mapped)

    def get(self, message: pb.SharedPool, size: int) -> Bytes:
        """The pool's memory, as `open_pool` gives it; raises the same."""
        known = self._mapped.get(message.key)
        if known is None or len(known.data) != size:
            known = self._mapped[message.key] = open_pool(message, size)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        return known.data

    async def close(self) -> None:
        """Lets go of everything."""
        self._mapped.clear()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def _watch(self) -> None:
        while self._mapped:
            await asyncio.sleep(self._watch_s)
            self._mapped = {key: each for key, each in self._mapped.items() if each.owned()}
