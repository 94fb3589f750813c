"""Collectives through shared memory, for members on one host: a copy in, one round of semaphores, a copy out.

Round k, on every member: write into the own slot of half k mod 2, announce it with k, post to every other member, take a post
of every other member, read their slots. Two halves make one round per exchange enough: a member writes a half again in round
k + 2, after all others have announced k + 1, which they do when they have read what they wanted of round k. Tensors beyond a
slot go piece by piece, one round each. Members whose announcements differ in round, operation or size raise.

Waiting is a short spin that yields, then sleep in slices; between slices the members are looked over: one that has died (its
lock is free) or closed the group ends the wait at once, a frozen one ends it at the deadline.
"""

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rank_server.collectives.base import CollectiveError
from rank_server.collectives.exchange import ExchangeGroup
from rank_server.collectives.shm_calls import OPERATIONS, call_of, pieces
from rank_server.collectives.shm_exchange import Call, Exchange
from rank_server.collectives.shm_program import SPIN_S, Out
from rank_server.collectives.shm_segment import Control, Segment
from rank_server.compiled.tape import Recorder, recorder

SLICE_S = 0.02
"""Longest time until a waiting member notices that another one died or left."""
SUMS = {torch.float32: Out.SUM_FLOAT32, torch.bfloat16: Out.SUM_BFLOAT16}
"""Dtypes whose sums the compiled round takes."""
LENT_BYTES = 256 * 1024
"""Smaller tensors are copied by the compiled round, which takes less time than lending does."""


class ShmGroup(ExchangeGroup):
    """One member's end of a segment. compiled: a round that moves whole tensors is one compiled call; the others can't tell."""

    recordable = True

    def __init__(self, name: str, size: int, index: int, timeout_s: float, segment: Segment, compiled: bool = True) -> None:
        super().__init__(name, size, index, timeout_s)
        self._segment: Segment | None = segment
        self._slot_bytes = segment.slot_bytes
        self._slots = [[segment.slot(half, member) for member in range(size)] for half in range(2)]
        self._others = [member for member in range(size) if member != index]
        self._posts = [segment.semaphore(index, other) for other in self._others]
        self._waits = [segment.semaphore(other, index) for other in self._others]
        self._rounds_without_program = 0
        # What fits one round: a whole tensor, and the chunks of one.
        self._one_round = segment.slot_bytes if compiled else -1
        self._one_round_of_chunks = segment.slot_bytes // size * size if compiled else -1
        self._exchange = Exchange(segment, index) if compiled else None

    def _sum(self, op: str, x: Tensor) -> Tensor:
        if x.dtype not in SUMS or x.nbytes > self._one_round:
            return super()._sum(op, x)
        return self._at_once(op, x, torch.empty_like(x), 0, x.nbytes, SUMS[x.dtype])

    def _sum_chunks(self, op: str, x: Tensor) -> Tensor:
        if x.dtype not in SUMS or x.nbytes > self._one_round_of_chunks:
            return super()._sum_chunks(op, x)
        chunk = x.nbytes // self.size
        return self._at_once(op, x, torch.empty_like(x[0]), self.index * chunk, chunk, SUMS[x.dtype])

    def _gather(self, op: str, x: Tensor) -> Tensor:
        result = x.new_empty((self.size, *x.shape))
        if x.nbytes <= self._one_round:
            return self._at_once(op, x, result, 0, x.nbytes, Out.PARTS)
        segment, source, target, total = self._mapped(), _address(x), _address(result), x.nbytes
        deadline = self._deadline()
        for start, stop in pieces(total, self._slot_bytes):
            width = stop - start
            slots = self._round(segment, OPERATIONS.index(op), total, [(source + start, width)], deadline)
            for member, slot in enumerate(slots):
                ctypes.memmove(target + member * total + start, slot, width)
        return result

    def _swap(self, op: str, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        if x.nbytes <= self._one_round_of_chunks:
            chunk = x.nbytes // self.size
            return self._at_once(op, x, result, self.index * chunk, chunk, Out.PARTS)
        segment, source, target, total = self._mapped(), _address(x), _address(result), x.nbytes
        chunk = total // self.size
        deadline = self._deadline()
        for start, stop in pieces(chunk, self._slot_bytes // self.size):
            width = stop - start
            parts = [(source + member * chunk + start, width) for member in range(self.size)]
            slots = self._round(segment, OPERATIONS.index(op), total, parts, deadline)
            for member, slot in enumerate(slots):
                ctypes.memmove(target + member * chunk + start, slot + self.index * width, width)
        return result

    def _lend(self, op: str, xs: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """Others' chunks are views of their slots; nobody shows the chunk that stays. One round for all tensors."""
        total, others = sum(x.nbytes for x in xs), self.size - 1
        # What members announce decides it, so that they can't go different ways unnoticed.
        if total < LENT_BYTES or total // self.size * others > self._slot_bytes:
            return super()._lend(op, xs)
        if (notes := recorder()) is not None:
            notes.refuse(f"chunks that group {self.name} lends: each round has them elsewhere")
        segment = self._mapped()
        parts = [(_address(x[other]), x[other].nbytes) for x in xs for other in self._others]
        self._round(segment, OPERATIONS.index(op), total, parts, self._deadline())
        lent, begin = [], 0
        for x in xs:
            chunks, chunk = list(x.unbind()), x.nbytes // self.size
            for other in self._others if chunk else ():  # there are no views of nothing
                # Behind those of the members before this one; the other's own is not among them.
                place = self.index - (self.index > other)
                at = segment.slot_at(self._rounds % 2, other) + begin + place * chunk
                view = torch.frombuffer(segment.memory, dtype=x.dtype, count=chunk // x.itemsize, offset=at)
                chunks[other] = view.view(x.shape[1:])
            lent.append(chunks)
            begin += others * chunk
        return lent

    def _copy(self, x: Tensor, root: int) -> Tensor:
        result = torch.empty_like(x)
        segment, source, target, total = self._mapped(), _address(x), _address(result), x.nbytes
        deadline = self._deadline()
        # The code tells the root: members that disagree about it must not go on with different results.
        code = OPERATIONS.index("broadcast") + root
        for start, stop in pieces(total, self._slot_bytes):
            parts = [(source + start, stop - start)] if self.index == root else []
            slots = self._round(segment, code, total, parts, deadline)
            ctypes.memmove(target + start, slots[root], stop - start)
        return result

    def _meet(self) -> None:
        self._round(self._mapped(), OPERATIONS.index("barrier"), 0, [], self._deadline())

    def _at_once(self, op: str, x: Tensor, result: Tensor, skip: int, width: int, out: Out) -> Tensor:
        """Shows x, and fills `result` from `width` bytes, behind `skip`, of every member's slot; returns it."""
        segment, exchange, deadline = self._mapped(), self._exchange, self._deadline()
        assert exchange is not None
        call = Call(_address(x), result.data_ptr(), x.nbytes, skip, width, out, OPERATIONS.index(op))
        if not exchange(call):
            self._complete(segment, exchange, call, deadline)
        self._check_open()
        if (notes := recorder()) is not None:
            self._note(notes, exchange, call, op)
        return result

    def _complete(self, segment: Segment, exchange: Exchange, call: Call, deadline: float) -> None:
        """The rest of a compiled call that stopped."""
        number = exchange.rounds + 1
        for address in self._waits[exchange.taken :]:
            self._sleep(segment, address, number, deadline)
        self._check_open()
        self._check_announcements(segment, number, call.code, call.total)
        exchange.finish()

    def _note(self, notes: Recorder, exchange: Exchange, call: Call, op: str) -> None:
        def resume() -> None:
            with self._timed(op):
                self._complete(self._mapped(), exchange, call, self._deadline())

        exchange.note(notes, call, resume)
        notes.exchanges[self._replayed] = notes.exchanges.get(self._replayed, 0) + 1

    @contextmanager
    def _replayed(self, calls: int) -> Iterator[None]:
        """Surrounds a tape with so many of the group's calls: counts them, and holds what they have addresses of."""
        self._check_open()
        segment, exchange = self._segment, self._exchange
        assert exchange is not None
        if segment is None:
            raise CollectiveError(f"group {self.name} can't be used, member {self.index}: it was closed")
        before = exchange.seconds
        try:
            yield
        finally:
            self.calls += calls
            self.seconds += exchange.seconds - before
            del segment
        self._check_open()

    @property
    def _rounds(self) -> int:
        return self._rounds_without_program if self._exchange is None else self._exchange.rounds

    @_rounds.setter
    def _rounds(self, number: int) -> None:
        if self._exchange is None:
            self._rounds_without_program = number
        else:
            self._exchange.rounds = number

    def _mapped(self) -> Segment:
        """The segment, which whoever uses its addresses must hold: `close` on another thread gives up the group's own hold."""
        segment = self._segment
        if segment is None:
            raise RuntimeError("the group was closed")
        return segment

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def _round(
        self, segment: Segment, code: int, total: int, parts: Sequence[tuple[int, int]], deadline: float
    ) -> Sequence[int]:
        """Shows the parts (address and bytes), one behind the other, to the others.

        Returns the addresses of all members' slots, to be read before the next round.
        """
        if (notes := recorder()) is not None:
            notes.refuse(f"{call_of(code, total)} in group {self.name}, which is not one compiled call")
        number = self._rounds + 1
        half = number % 2
        slots = self._slots[half]
        at = slots[self.index]
        for address, width in parts:
            ctypes.memmove(at, address, width)
            at += width
        own = segment.control[self.index]
        own[Control.CALL[half]], own[Control.TOTAL[half]], own[Control.ROUND[half]] = code, total, number
        post = segment.semaphores.post
        for address in self._posts:
            post(address)
        for address in self._waits:
            self._wait(segment, address, number, deadline)
        self._check_open()
        self._check_announcements(segment, number, code, total)
        self._rounds = number
        return slots

    def _wait(self, segment: Segment, address: int, number: int, deadline: float) -> None:
        """Takes a post; RuntimeError when none comes."""
        try_wait = segment.semaphores.try_wait
        if try_wait(address) == 0:
            return
        spin_end = time.monotonic() + SPIN_S
        while time.monotonic() < spin_end:
            # Without the yield, members that outnumber the CPUs would keep those they wait for from running.
            os.sched_yield()
            if try_wait(address) == 0:
                return
        self._sleep(segment, address, number, deadline)

    def _sleep(self, segment: Segment, address: int, number: int, deadline: float) -> None:
        """The same without a spin."""
        while (left := deadline - time.monotonic()) > 0:
            if segment.semaphores.wait(address, min(SLICE_S, left)):
                return
            self._check_open()
            self._check_members(segment, number)
        missing = [other for other in self._others if segment.control[other][Control.ROUND[number % 2]] != number]
        raise RuntimeError(f"members {missing} did not come within {self._timeout_s:g} s")

    def _check_members(self, segment: Segment, number: int) -> None:
        """Raises RuntimeError when a member can't come any more."""
        for other in self._others:
            control = segment.control[other]
            if control[Control.LEFT]:
                self._check_left(segment, other, number)
            elif control[Control.JOINED] and not segment.alive(other):
                raise RuntimeError(f"member {other} died")

    def _check_left(self, segment: Segment, other: int, number: int) -> None:
        control = segment.control[other]
        if control[Control.LEFT] and control[Control.LAST_ROUND] < number:
            raise RuntimeError(f"member {other} has left the group")

    def _check_announcements(self, segment: Segment, number: int, code: int, total: int) -> None:
        """RuntimeError unless all others make the same call in the same round."""
        for other in self._others:
            self._check_announcement(segment, other, number, code, total)

    def _check_announcement(self, segment: Segment, other: int, number: int, code: int, total: int) -> None:
        control, half = segment.control[other], number % 2
        announced = control[Control.ROUND[half]] == number
        if announced and (control[Control.CALL[half]], control[Control.TOTAL[half]]) != (code, total):
            theirs = call_of(control[Control.CALL[half]], control[Control.TOTAL[half]])
            raise RuntimeError(f"member {other} calls {theirs} where member {self.index} calls {call_of(code, total)}")
        # A member that gave up waiting in this round had announced it: without this check one that comes later would go on.
        self._check_left(segment, other, number)
        if not announced:
            raise RuntimeError(f"member {other} is in round {control[Control.ROUND[half]]} instead of {number}")

    def _release(self, reason: str) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        own = segment.control[self.index]
        own[Control.LAST_ROUND], own[Control.LEFT] = self._rounds, 1
        # Wakes everybody who waits for this member, and this member's own operation: they find no announcement and look around.
        for address in (*self._posts, *self._waits):
            segment.semaphores.post(address)


def _address(x: Tensor) -> int:
    """Where a contiguous tensor lies; ValueError when that is not in this process's memory."""
    if not x.is_cpu:
        raise ValueError(f"shm collectives move CPU tensors, not {x.device}")
    return x.data_ptr()
