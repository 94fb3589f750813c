"""Who holds what in one scheduling set: requests by their place in its life, and every change of it.

Pure bookkeeping below the scheduler, which decides when. A request of this set alone goes waiting → running → gone, and back
to waiting when it is preempted. One whose KV comes from another set goes reserved → arrived → running. One whose KV is
read by another set is *leased* meanwhile: nobody takes its blocks away, and if it is over before its readers are,
its blocks stay *held* until they are.
"""

from collections import OrderedDict

from coordinator.kv_blocks import KvBlocks, Placement
from coordinator.owners import Owners
from coordinator.request import Event, Request


class Seats:
    """Requests by handle.

    waiting: hold nothing. reserved: hold blocks that KV is moved to, the ranks know nothing of them. arrived: the same, but
    the KV is there and the next step may take them in. running: hold blocks and the ranks know them.
    """

    def __init__(self, kv: KvBlocks, owners: Owners) -> None:
        self._kv = kv
        self._owners = owners
        self.waiting: OrderedDict[int, Request] = OrderedDict()
        self.reserved: dict[int, Request] = {}
        self.arrived: OrderedDict[int, Request] = OrderedDict()
        self.running: OrderedDict[int, Request] = OrderedDict()
        self.released: list[int] = []
        """What the ranks are to forget with the next step."""
        self._held: dict[int, Request] = {}
        """Over, but still read."""
        self.stuck: int | None = None
        """The request at the front of a queue, when nothing has been given back, and no prompt has been completed, since it
        was found not to fit."""

    def __contains__(self, handle: int) -> bool:
        return any(handle in each for each in (self.running, self.waiting, self.reserved, self.arrived, self._held))

    @property
    def num_seated(self) -> int:
        """Requests that have a seat, or will have one without asking again."""
        return len(self.running) + len(self.reserved) + len(self.arrived)

    def may_grow(self, max_seated: int) -> bool:
        """Whether a step may take in another request although none leaves before; max_seated: seats there are."""
        front = next(iter(self.waiting), self.stuck)
        return bool(self.arrived) or (self.num_seated < max_seated and front != self.stuck)

    def clear(self) -> list[Request]:
        """All is lost; returns the requests that were not over."""
        ended = [*self.running.values(), *self.arrived.values(), *self.reserved.values(), *self.waiting.values()]
        for each in (self.running, self.arrived, self.reserved, self.waiting, self.released, self._held):
            each.clear()
        self.stuck = None
        self._kv.clear()
        self._owners.clear()
        return ended

    def queue(self, request: Request) -> None:
        """A new request waits."""
        self._kv.open(request)
        self.waiting[request.handle] = request

    def admit(self, request: Request, placement: Placement) -> None:
        """A waiting request gets a seat and the blocks of its prefix hit."""
        del self.waiting[request.handle]
        self._place(request, placement)
        self._kv.admit(request, placement)
        self._kv.announce(request)
        self._run(request)

    def reserve(self, request: Request, placement: Placement, length: int) -> None:
        """A new request gets the blocks of its prefix hit, and all others that its first `length` tokens need."""
        self._place(request, placement)
        self._kv.admit(request, placement)
        self._kv.grow(request, self._kv.missing(request, length))
        self.reserved[request.handle] = request

    def arrive(self, handle: int, num_computed: int) -> None:
        """The KV of a reserved request's first `num_computed` tokens is in its blocks; nothing for an unknown handle."""
        request = self.reserved.pop(handle, None)
        if request is not None:
            request.num_computed = num_computed
            self.arrived[handle] = request

    def take_in(self, request: Request) -> None:
        """An arrived request runs."""
        del self.arrived[request.handle]
        self._kv.announce(request)
        self._run(request)

    def cancel(self, handle: int, reason: str) -> None:
        """Ends a reserved or arrived request, whose blocks nobody may write to any more; nothing for an unknown handle."""
        request = self.reserved.pop(handle, None) or self.arrived.pop(handle, None)
        if request is not None:
            request.end(Event.END, reason)
            self._kv.release(request)
            self._kv.close(request)
            self.stuck = None

    def victim(self, request: Request) -> Request | None:
        """The youngest running request whose blocks can be taken away, `request` at the oldest; None when there is none."""
        for each in reversed(self.running.values()):
            if not each.is_leased:
                return each
            if each is request:
                break
        return None

    def preempt(self, request: Request) -> None:
        """A running request, not leased, goes to the front of the queue."""
        request.apply(Event.PREEMPT)
        request.num_computed = 0
        request.num_preemptions += 1
        self._stand_up(request)
        self._kv.release(request)
        self.waiting[request.handle] = request
        self.waiting.move_to_end(request.handle, last=False)

    def leave(self, request: Request, reason: str, error: str | None = None) -> None:
        """A running request is over; blocks that are leased stay held."""
        request.end(Event.END, reason, error)
        self._stand_up(request)
        if request.is_leased:
            self._held[request.handle] = request
        else:
            self._kv.release(request)
            self._kv.close(request)

    def end_lease(self, handle: int) -> None:
        """Nobody reads a leased request's blocks any more; nothing for an unknown handle."""
        if (held := self._held.pop(handle, None)) is not None:
            self._kv.release(held)
            self._kv.close(held)
            self.stuck = None
        for each in (self.running, self.waiting):
            if handle in each:
                each[handle].is_leased = False

    def _place(self, request: Request, placement: Placement) -> None:
        request.shard_offset = placement.shard_offset
        request.num_computed = placement.num_cached_tokens

    def _run(self, request: Request) -> None:
        request.apply(Event.ADMIT)
        self._owners.admit(request)
        self.running[request.handle] = request

    def _stand_up(self, request: Request) -> None:
        """The ranks hear of it with the next step. A queue that was stuck may move again."""
        del self.running[request.handle]
        self._owners.release(request)
        self._kv.retract(request)
        self.released.append(request.handle)
        self.stuck = None
