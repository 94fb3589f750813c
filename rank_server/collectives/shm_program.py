"""One round of a shared-memory group as one compiled call: copy in, posts, waits, checks, and the copy or sum out.

The program does what it can without asking the system for more than a yield. Where members let it wait too long, or announce
something else, it stops and says which posts it has taken; whoever called it goes on from there, and calls it again for the
way out, so that results are the same bits however a round went.
"""

import ctypes
import struct
from collections.abc import Callable
from enum import IntEnum
from functools import cache

from llvmlite import ir

from rank_server.collectives.shm_segment import Control, Segment
from rank_server.collectives.shm_semaphore import CLOCK_MONOTONIC
from rank_server.compiled.emitter import HALVES, I32, I64, LANES, POINTER, VECTOR, Emitter
from rank_server.compiled.memory import copy
from rank_server.compiled.translation import Compiled, translate

SPIN_S = 100e-6
"""How long a wait looks again and again before it sleeps; in between it offers its CPU to whoever wants to run."""
_NS = 10**9


class Out(IntEnum):
    """What becomes of the members' parts."""

    PARTS = 0
    """One behind the other, in member order."""
    SUM_FLOAT32 = 1
    """((x₀ + x₁) + x₂) + … of fp32 numbers."""
    SUM_BFLOAT16 = 2
    """The same of bf16 numbers, in fp32, rounded once; a subnormal sum may become 0."""


class _Word(IntEnum):
    """The program's arguments, 64-bit integers; behind them its addresses: of the semaphores to post and of those to wait for,
    of the others' control blocks, of all members' slots of the even half, and of the odd half."""

    DONE = 0
    """An answer: 1 when the result is there."""
    TAKEN = 1
    """An answer: how many posts were taken, in the order of the semaphores, where it isn't."""
    READ_ONLY = 2
    """1: the round has taken place, and only the result is missing."""
    SOURCE = 3
    TARGET = 4
    TOTAL = 5
    """Bytes to show, from SOURCE on."""
    SKIP = 6
    """Bytes of a slot before what this member reads of it."""
    WIDTH = 7
    """Bytes that it reads of each slot."""
    OUT = 8
    CODE = 9
    NUMBER = 10
    """Of the round."""
    SIZE = 11
    INDEX = 12
    OWN_CONTROL = 13
    ADDRESSES = 14


class Exchange:
    """The compiled round of one member. Holds addresses of a segment, which whoever calls must hold."""

    def __init__(self, segment: Segment, index: int) -> None:
        members = range(segment.size)
        others = [member for member in members if member != index]
        addresses = [
            *(segment.semaphore(index, other) for other in others),
            *(segment.semaphore(other, index) for other in others),
            *(segment.control_block(other) for other in others),
            *(segment.slot(half, member) for half in range(2) for member in members),
        ]
        constant = [segment.size, index, segment.control_block(index), *addresses]
        self._words = (ctypes.c_int64 * (_Word.SIZE + len(constant)))(*[0] * _Word.SIZE, *constant)
        self._pack = struct.Struct(f"={_Word.SIZE}q").pack_into
        self._compiled = _program()
        # Python's lock is given away: members may be threads of one process.
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._compiled.address)

    def __call__(self, source: int, target: int, total: int, skip: int, width: int, out: Out, code: int, number: int) -> bool:
        """Round `number`: shows `total` bytes at `source`, and writes to `target` what becomes of each member's `width` bytes
        from `skip` on. False where it stopped with `taken` posts; then nothing was written, and `finish` is to follow."""
        words = self._words
        self._pack(words, 0, 0, 0, 0, source, target, total, skip, width, out, code, number)
        self._run(words)
        return words[_Word.DONE] == 1

    @property
    def taken(self) -> int:
        """Posts taken by a call that stopped: those of the first so many others."""
        return self._words[_Word.TAKEN]

    def finish(self) -> None:
        """Writes the result of the call that stopped, once all others are known to have shown their parts."""
        self._words[_Word.READ_ONLY] = 1
        self._run(self._words)


@cache
def _program() -> Compiled:
    return translate(_Writer().e)


class _Writer:
    """Writes the program. The order of its loads and stores is that of the semaphores' calls, which LLVM moves none across."""

    def __init__(self) -> None:
        self.e = e = Emitter("exchange")
        self.others = e.b.sub(self.word(_Word.SIZE), e.integer(1))
        self.half = e.b.and_(self.word(_Word.NUMBER), e.integer(1))
        with e.b.if_then(e.b.icmp_signed("==", self.word(_Word.READ_ONLY), e.integer(0))):
            self._show()
            self._wait()
            self._check()
        out = self.word(_Word.OUT)
        with e.b.if_then(e.b.icmp_signed("==", out, e.integer(Out.PARTS))):
            self._copy()
        for kind, memory in ((Out.SUM_FLOAT32, VECTOR), (Out.SUM_BFLOAT16, HALVES)):
            with e.b.if_then(e.b.icmp_signed("==", out, e.integer(kind))):
                self._sum(memory)
        e.store(e.integer(1), e.function.args[0], _Word.DONE)

    def word(self, index: ir.Value | int) -> ir.Value:
        """An argument."""
        return self.e.load(self.e.function.args[0], I64, index)

    def address(self, table: int, index: ir.Value) -> ir.Value:
        """Of the semaphores to post (0), to wait for (1), of control blocks (2)."""
        return self.word(self.e.at(self.e.times(self.others, table), _Word.ADDRESSES, index))

    def slot(self, member: ir.Value) -> ir.Value:
        """Address of what a member shows in this round."""
        before = self.e.times(self.others, 3)
        return self.word(self.e.at(before, self.e.times(self.half, self.word(_Word.SIZE)), _Word.ADDRESSES, member))

    def of_half(self, words: tuple[int, int]) -> ir.Value:
        """Number of a control word of this round's half."""
        even, odd = words
        return self.e.at(self.e.times(self.half, odd - even), even)

    def announcement(self) -> list[tuple[ir.Value, ir.Value]]:
        """Control words, and what they are of a member that makes the same call in the same round."""
        words = ((Control.CALL, _Word.CODE), (Control.TOTAL, _Word.TOTAL), (Control.ROUND, _Word.NUMBER))
        return [(self.of_half(control), self.word(word)) for control, word in words]

    def _show(self) -> None:
        e = self.e
        copy(e, self.slot(self.word(_Word.INDEX)), self.word(_Word.SOURCE), self.word(_Word.TOTAL))
        own = self.word(_Word.OWN_CONTROL)
        for word, value in self.announcement():
            e.store(value, own, word)
        with e.loop(0, self.others) as other:
            e.call("sem_post", I32, e.b.inttoptr(self.address(0, other), POINTER))

    def _wait(self) -> None:
        """Takes a post of each other; all of them within SPIN_S, or it ends the program."""
        e = self.e
        until = e.variable(e.integer(0))
        with e.loop(0, self.others) as other:
            look, wait, stop, again, taken = (
                e.function.append_basic_block(name) for name in ("look", "wait", "stop", "again", "taken")
            )
            semaphore = e.b.inttoptr(self.address(1, other), POINTER)
            e.b.branch(look)
            e.b.position_at_end(look)
            answer = e.call("sem_trywait", I32, semaphore)
            e.b.cbranch(e.b.icmp_signed("==", answer, ir.Constant(I32, 0)), taken, wait)
            e.b.position_at_end(wait)
            now = self._now()
            begun = e.b.icmp_signed("!=", e.get(until), e.integer(0))
            e.set(until, e.b.select(begun, e.get(until), e.at(now, round(SPIN_S * _NS))))
            e.b.cbranch(e.b.icmp_signed("<", now, e.get(until)), again, stop)
            e.b.position_at_end(stop)
            self._stop(other)
            e.b.position_at_end(again)
            # Without the yield, members that outnumber the CPUs would keep those they wait for from running.
            e.call("sched_yield", I32)
            e.b.branch(look)
            e.b.position_at_end(taken)

    def _now(self) -> ir.Value:
        """Nanoseconds on the clock that never steps."""
        e = self.e
        seconds_nanoseconds = e.array(1)
        clock = ir.Constant(I32, CLOCK_MONOTONIC)
        e.call("clock_gettime", I32, clock, e.b.inttoptr(seconds_nanoseconds, POINTER))
        return e.at(e.times(e.load(seconds_nanoseconds, I64), _NS), e.load(seconds_nanoseconds, I64, 1))

    def _check(self) -> None:
        """Ends the program where another has left, or has announced anything else: why that is so is asked elsewhere."""
        e = self.e
        differing = e.variable(e.integer(0))
        with e.loop(0, self.others) as other:
            theirs = self.address(2, other)
            for word, wanted in [(e.integer(Control.LEFT), e.integer(0)), *self.announcement()]:
                difference = e.b.xor(e.load(theirs, I64, word), wanted)
                e.set(differing, e.b.or_(e.get(differing), difference))
        stop, same = (e.function.append_basic_block(name) for name in ("stop", "same"))
        e.b.cbranch(e.b.icmp_signed("!=", e.get(differing), e.integer(0)), stop, same)
        e.b.position_at_end(stop)
        self._stop(self.others)
        e.b.position_at_end(same)

    def _stop(self, taken: ir.Value) -> None:
        """Ends the program with so many posts taken."""
        self.e.store(taken, self.e.function.args[0], _Word.TAKEN)
        self.e.b.ret_void()

    def _copy(self) -> None:
        e, width = self.e, self.word(_Word.WIDTH)
        with e.loop(0, self.word(_Word.SIZE)) as member:
            target = e.at(self.word(_Word.TARGET), e.times(member, width))
            copy(e, target, e.at(self.slot(member), self.word(_Word.SKIP)), width)

    def _sum(self, memory: ir.Type) -> None:
        """LANES numbers at a time, each group over all members; the last group may be smaller. memory: a group's type there."""
        e = self.e
        target, skip, width = self.word(_Word.TARGET), self.word(_Word.SKIP), self.word(_Word.WIDTH)
        number = 2 if memory == HALVES else 4

        def total(at: ir.Value, load: Callable[[ir.Value], ir.Value]) -> ir.Value:
            def term(member: ir.Value) -> ir.Value:
                numbers = load(e.at(self.slot(member), skip, at))
                return e.widened(numbers) if memory == HALVES else numbers

            found = e.variable(term(e.integer(0)))
            with e.loop(1, self.word(_Word.SIZE)) as member:
                e.set(found, e.b.fadd(e.get(found), term(member)))
            return e.rounded(e.get(found)) if memory == HALVES else e.get(found)

        whole = e.times(e.b.sdiv(width, e.integer(number * LANES)), number * LANES)
        with e.loop(0, whole, number * LANES) as at:
            e.store(total(at, lambda place: e.load(place, memory)), e.at(target, at))
        left = e.b.sdiv(e.b.sub(width, whole), e.integer(number))
        with e.b.if_then(e.b.icmp_signed(">", left, e.integer(0))):
            e.store_first(left, total(whole, lambda place: e.load_first(left, place, memory)), e.at(target, whole))
