"""Collectives without tensors: fake ranks wait for one another as real ones do."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field


class PeerGone(Exception):
    """A collective that will not end well; like gloo's, its text names the peer's address."""


@dataclass
class Meeting:
    """A collective under way."""

    ranks: Sequence[int]
    complete: "asyncio.Future[None]"
    arrived: set[int] = field(default_factory=set)
    yes: bool = False
    """Whether anybody who has come said so."""

    def fail(self, why: str) -> None:
        """For all who wait, and for all who come later."""
        if not self.complete.done():
            self.complete.set_exception(PeerGone(f"{why} [10.9.8.7]:4242"))
            self.complete.exception()  # those who waited may be gone too


class Room:
    """Where the ranks of a cluster meet."""

    def __init__(self) -> None:
        self._gone: set[int] = set()
        self._meetings: dict[str, Meeting] = {}

    def enter(self, rank: int) -> None:
        """A process has started."""
        self._gone.discard(rank)

    def leave(self, rank: int) -> None:
        """A process has died: whoever waits for it notices at once."""
        self._gone.add(rank)
        for meeting in self._meetings.values():
            if rank in meeting.ranks:
                meeting.fail("connection reset by")

    async def meet(self, what: str, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        """Returns when all have come; PeerGone when one can't, or does not in time."""
        await self.agree(what, rank, ranks, timeout_s, False)

    async def agree(self, what: str, rank: int, ranks: Sequence[int], timeout_s: float, says: bool) -> bool:
        """`meet`; whether anybody says so."""
        if self._gone & set(ranks):
            raise PeerGone("broken pipe to [10.9.8.7]:4242")
        complete = asyncio.get_running_loop().create_future()
        meeting = self._meetings.setdefault(what, Meeting(ranks, complete))
        meeting.arrived.add(rank)
        meeting.yes |= says
        if meeting.arrived == set(ranks):
            del self._meetings[what]
            if not meeting.complete.done():
                meeting.complete.set_result(None)
        try:
            await asyncio.wait_for(asyncio.shield(meeting.complete), timeout_s)
        except TimeoutError:
            meeting.fail(f"{what}: nothing within {timeout_s:g} s from")
            raise PeerGone(f"{what}: timed out") from None
        return meeting.yes
