"""How long a source's blocks may be read: one lease per session, renewed by its readers, ended once and reported once.

Pure but for the clock it is given. A lease ends when all its readers have released it, when it is cancelled, or when it was
not renewed in time. Until the owner has taken the end from `take_ended` it frees nothing, so no block returns to the pool
while it may still be read; what is asked of an ended lease is refused.

All methods belong to one thread, the one that also reads the blocks.
"""

import asyncio
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cp_wire.errors import LeaseEnded, Stale, Unknown
from kv_transfer.generations import Generations

End = Literal["released", "expired", "cancelled"]

REMEMBERED = 4096
"""Ended sessions of which a late caller still learns how they ended."""


@dataclass(slots=True)
class Lease:
    """The blocks of one request on one rank, for the target ranks that read them."""

    session: int
    epoch: int
    shard_offset: int
    generation: int
    deadline: float
    readers: set[int]
    """Target ranks that have not released yet."""
    ttl_s: float
    """How long it lasts without being renewed."""
    blocks: NDArray[np.int64]
    """The rank's block table of the request."""
    tokens: int
    """Tokens [0, tokens) of the request, over all shards, can be read."""
    attempts: dict[Hashable, int] = field(default_factory=dict)
    """Newest attempt of each reader at each range."""
    checked: int = -1
    """Newest stamp of the pool when the blocks were last looked at."""
    plans: dict[Hashable, Any] = field(default_factory=dict)
    """What its readers asked for, worked out; goes with the lease."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease that is over: its blocks are the owner's again."""

    session: int
    how: End
    blocks: tuple[int, ...]


class LeaseTable:
    """The leases of one rank. clock: seconds, monotonic; ttl_s: how long a lease lasts without being renewed, unless its
    grant says otherwise."""

    def __init__(self, generations: Generations, clock: Callable[[], float], ttl_s: float) -> None:
        self._generations = generations
        self._clock = clock
        self._ttl_s = _lasting(ttl_s)
        self._active: dict[int, Lease] = {}
        self._ended: list[Ended] = []
        self._fate: dict[int, End] = {}

    def grant(
        self,
        session: int,
        epoch: int,
        shard_offset: int,
        blocks: Sequence[int],
        tokens: int,
        readers: Iterable[int],
        ttl_s: float | None = None,
    ) -> None:
        """Opens a session; without readers it ends at once. `Stale` when the session exists or has existed."""
        if session in self._active or session in self._fate:
            raise Stale(f"transfer {session} was granted before")
        ttl_s = self._ttl_s if ttl_s is None else _lasting(ttl_s)
        deadline, held = self._clock() + ttl_s, np.array(blocks, np.int64)
        lease = Lease(session, epoch, shard_offset, self._generations.now(), deadline, set(readers), ttl_s, held, tokens)
        self._active[session] = lease
        if not lease.readers:
            self._end(lease, "released")

    def extend(self, session: int, blocks: Sequence[int], tokens: int) -> None:
        """More of the request can be read: `blocks` are appended, [0, tokens) is complete. Counts as a renewal."""
        lease = self.get(session)
        if tokens < lease.tokens:
            raise Stale(f"transfer {session} has {lease.tokens} tokens, it cannot shrink to {tokens}")
        lease.blocks = np.concatenate([lease.blocks, np.asarray(blocks, np.int64)])
        lease.tokens = tokens
        lease.generation = self._generations.now()
        lease.deadline = self._clock() + lease.ttl_s

    def get(self, session: int) -> Lease:
        """The session's lease if it can be read now; `LeaseEnded`, `Stale` or `Unknown` say why not.

        `Stale`: a block of it has got another owner, which only a fault of the owner can bring about.
        """
        lease = self._active.get(session)
        if lease is not None and lease.deadline <= self._clock():
            self._end(lease, "expired")
            lease = None
        if lease is None:
            how = self._fate.get(session)
            if how is None:
                raise Unknown(f"transfer {session} is not known here")
            raise LeaseEnded(f"the lease of transfer {session} is {how}")
        now = self._generations.now()
        if lease.checked != now:
            # A long request has many blocks, and is asked for with every message.
            if not self._generations.untouched(lease.blocks, lease.generation):
                raise Stale(f"blocks of transfer {session} were handed out again while it was leased")
            lease.checked = now
        return lease

    def renew(self, session: int) -> Lease:
        """Prolongs the lease to a whole ttl from now."""
        lease = self.get(session)
        lease.deadline = self._clock() + lease.ttl_s
        return lease

    def release(self, session: int, reader: int) -> None:
        """The reader needs the session no longer; the last one ends it. A repeated or late release changes nothing."""
        lease = self._active.get(session)
        if lease is not None:
            lease.readers.discard(reader)
            if not lease.readers:
                self._end(lease, "released")

    def cancel(self, session: int) -> None:
        """Ends the session for everybody, if it is still there."""
        lease = self._active.get(session)
        if lease is not None:
            self._end(lease, "cancelled")

    def close(self, session: int) -> End | None:
        """Like `cancel`, and a session that is not known yet will never be granted.

        Returns how the session has ended, None for one that was not known.
        """
        self.expire()
        self.cancel(session)
        how = self._fate.get(session)
        if how is None:
            self._remember(session, "cancelled")
        return how

    def cancel_all(self) -> None:
        """Ends every session."""
        for session in list(self._active):
            self.cancel(session)

    def expire(self) -> None:
        """Ends what was not renewed in time."""
        now = self._clock()
        for lease in [lease for lease in self._active.values() if lease.deadline <= now]:
            self._end(lease, "expired")

    def take_ended(self) -> list[Ended]:
        """Leases that ended since the last call, each once."""
        self.expire()
        ended, self._ended = self._ended, []
        return ended

    @property
    def active(self) -> int:
        """Leases that can be read."""
        return len(self._active)

    def _end(self, lease: Lease, how: End) -> None:
        del self._active[lease.session]
        self._remember(lease.session, how)
        self._ended.append(Ended(lease.session, how, tuple(lease.blocks.tolist())))

    def _remember(self, session: int, how: End) -> None:
        self._fate[session] = how
        if len(self._fate) > REMEMBERED:
            del self._fate[next(iter(self._fate))]


def _lasting(ttl_s: float) -> float:
    if not ttl_s > 0:
        raise ValueError(f"a lease of {ttl_s} s never holds")
    return ttl_s


async def sweep(leases: LeaseTable, report: Callable[[list[Ended]], None], period_s: float) -> None:
    """Reports what has ended, every `period_s` seconds, whether or not anybody asks for anything; runs until cancelled."""
    while True:
        ended = leases.take_ended()
        if ended:
            report(ended)
        await asyncio.sleep(period_s)
