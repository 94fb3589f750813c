"""The one order of steps over the whole cluster."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager


class TicketOrder:
    """Which waiting steps may start: pure bookkeeping.

    A step starts when all its members have reported their previous one. Waiting steps reserve their members in ticket order,
    so two steps that share members reach all of them in the same order, and no step starves; steps without a common member
    never wait for each other.
    """

    def __init__(self) -> None:
        self._last = 0
        self._busy: set[int] = set()
        self._members: dict[int, frozenset[int]] = {}
        self._waiting: dict[int, None] = {}

    def draw(self, members: Iterable[int]) -> int:
        """A new ticket for a step of these ranks; it waits until `startable` returns it."""
        self._last += 1
        self._members[self._last] = frozenset(members)
        self._waiting[self._last] = None
        return self._last

    def startable(self) -> list[int]:
        """Tickets that start now, in order; their members are busy from here on."""
        started = []
        reserved: set[int] = set()
        for ticket in self._waiting:
            members = self._members[ticket]
            if not members & self._busy and not members & reserved:
                started.append(ticket)
            reserved |= members
        for ticket in started:
            del self._waiting[ticket]
            self._busy |= self._members[ticket]
        return started

    def give_back(self, ticket: int) -> None:
        """The step has ended, or will never start."""
        members = self._members.pop(ticket)
        if ticket in self._waiting:
            del self._waiting[ticket]
        else:
            self._busy -= members


class Dispatcher:
    """`TicketOrder` for coroutines."""

    def __init__(self) -> None:
        self._order = TicketOrder()
        self._waiters: dict[int, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def turn(self, members: Iterable[int]) -> AsyncIterator[int]:
        """Waits for the step's turn and yields its ticket; leaving the block frees the members."""
        ticket = self._order.draw(members)
        started = self._waiters[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._start()
            await started
            yield ticket
        finally:
            self._order.give_back(ticket)
            self._waiters.pop(ticket, None)
            self._start()

    def _start(self) -> None:
        for ticket in self._order.startable():
            waiter = self._waiters.pop(ticket)
            if not waiter.done():
                waiter.set_result(None)
