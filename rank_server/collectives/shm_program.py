"""One round of a shared-memory group as one compiled call: copy in, posts, waits, checks, and the copy or sum out.

While others are awaited it asks for memory that the member reads next, where it is told of some: it comes as the wait passes.
The program does what it can without asking the system for more than a yield. Where members let it wait too long, or announce
something else, it stops and says which posts it has taken; whoever called it goes on from there, and calls it again for the
way out, so that results are the same bits however a round went.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import cache

from llvmlite import ir

from rank_server.collectives.shm_segment import Control
from rank_server.compiled.clock import NS, nanoseconds
from rank_server.compiled.emitter import HALVES, I32, I64, LANES, LINE, POINTER, VECTOR, Emitter
from rank_server.compiled.memory import copy
from rank_server.compiled.translation import Compiled, translate

SPIN_S = 100e-6
"""How long a wait looks again and again before it sleeps; in between it offers its CPU to whoever wants to run."""

ASKED = 8 * LINE
"""Bytes of each range that are asked for before the first look, and between two looks."""


class Out(IntEnum):
    """What becomes of the members' parts."""

    PARTS = 0
    """One behind the other, in member order."""
    SUM_FLOAT32 = 1
    """((x₀ + x₁) + x₂) + … of fp32 numbers."""
    SUM_BFLOAT16 = 2
    """The same of bf16 numbers, in fp32, rounded once; a subnormal sum may become 0."""


class Word(IntEnum):
    """A call's argument, 64-bit integers."""

    DONE = 0
    """An answer: 1 when the result is there."""
    TAKEN = 1
    """An answer: how many posts were taken, in the order of the semaphores, where it isn't."""
    READ_ONLY = 2
    """1: the round has taken place, and only the result is missing."""
    MEMBER = 3
    """Address of what all calls of the member have in common, see `Member`."""
    SOURCE = 4
    TARGET = 5
    TOTAL = 6
    """Bytes to show, from SOURCE on."""
    SKIP = 7
    """Bytes of a slot before what this member reads of it."""
    WIDTH = 8
    """Bytes that it reads of each slot."""
    OUT = 9
    CODE = 10
    AHEAD = 11
    """Addresses of two ranges of memory that are asked for in turn, ASKED bytes of each at a time."""
    AHEAD_TOO = 12
    AHEAD_STEP = 13
    """Bytes from what was asked for of a range to what is next."""
    AHEAD_BYTES = 14
    """Asking ends so far behind the beginning of a range; 0: there is none."""
    SIZE = 15


class Member(IntEnum):
    """What a member's calls have in common; behind these words its addresses: of the semaphores to post and of those to wait
    for, of the others' control blocks, of all members' slots of the even half, and of the odd half."""

    ROUNDS = 0
    """Completed so far."""
    NANOSECONDS = 1
    """Spent in calls so far."""
    SIZE = 2
    INDEX = 3
    CONTROL = 4
    ADDRESSES = 5


@cache
def program() -> Compiled:
    """The program, given the address of `Word`s; takes some tenths of a second when it is first asked for."""
    return translate(_Writer().e)


class _Writer:
    """Writes the program. The order of its loads and stores is that of the semaphores' calls, which LLVM moves none across."""

    def __init__(self) -> None:
        self.e = e = Emitter("exchange")
        e.store(e.integer(0), e.function.args[0], Word.DONE)
        self.begun = nanoseconds(self.e)
        self.others = e.b.sub(self.common(Member.SIZE), e.integer(1))
        self.number = e.at(self.common(Member.ROUNDS), 1)
        self.half = e.b.and_(self.number, e.integer(1))
        with e.b.if_then(e.b.icmp_signed("==", self.word(Word.READ_ONLY), e.integer(0))):
            self._show()
            self._wait()
            self._check()
        out = self.word(Word.OUT)
        with e.b.if_then(e.b.icmp_signed("==", out, e.integer(Out.PARTS))):
            self._copy()
        for kind, memory in ((Out.SUM_FLOAT32, VECTOR), (Out.SUM_BFLOAT16, HALVES)):
            with e.b.if_then(e.b.icmp_signed("==", out, e.integer(kind))):
                self._sum(memory)
        e.store(self.number, self.word(Word.MEMBER), Member.ROUNDS)
        e.store(e.integer(0), e.function.args[0], Word.READ_ONLY)
        e.store(e.integer(1), e.function.args[0], Word.DONE)
        self._take_time()

    def word(self, index: ir.Value | int) -> ir.Value:
        """Of the argument."""
        return self.e.load(self.e.function.args[0], I64, index)

    def common(self, index: ir.Value | int) -> ir.Value:
        """Of what the member's calls have in common."""
        return self.e.load(self.word(Word.MEMBER), I64, index)

    def address(self, table: int, index: ir.Value) -> ir.Value:
        """Of the semaphores to post (0), to wait for (1), of control blocks (2)."""
        return self.common(self.e.at(self.e.times(self.others, table), Member.ADDRESSES, index))

    def slot(self, member: ir.Value) -> ir.Value:
        """Address of what a member shows in this round."""
        before = self.e.times(self.others, 3)
        half = self.e.times(self.half, self.common(Member.SIZE))
        return self.common(self.e.at(before, half, Member.ADDRESSES, member))

    def of_half(self, words: tuple[int, int]) -> ir.Value:
        """Number of a control word of this round's half."""
        even, odd = words
        return self.e.at(self.e.times(self.half, odd - even), even)

    def announcement(self) -> list[tuple[ir.Value, ir.Value]]:
        """Control words, and what they are of a member that makes the same call in the same round."""
        values = ((Control.CALL, self.word(Word.CODE)), (Control.TOTAL, self.word(Word.TOTAL)), (Control.ROUND, self.number))
        return [(self.of_half(control), value) for control, value in values]

    def _show(self) -> None:
        e = self.e
        copy(e, self.slot(self.common(Member.INDEX)), self.word(Word.SOURCE), self.word(Word.TOTAL))
        own = self.common(Member.CONTROL)
        for word, value in self.announcement():
            e.store(value, own, word)
        with e.loop(0, self.others) as other:
            e.call("sem_post", I32, e.b.inttoptr(self.address(0, other), POINTER))

    def _wait(self) -> None:
        """Takes a post of each other; all of them within SPIN_S, or it ends the program."""
        e = self.e
        until, asked = e.variable(e.integer(0)), e.variable(e.integer(0))
        self._ask(asked)
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
            now = nanoseconds(e)
            begun = e.b.icmp_signed("!=", e.get(until), e.integer(0))
            e.set(until, e.b.select(begun, e.get(until), e.at(now, round(SPIN_S * NS))))
            e.b.cbranch(e.b.icmp_signed("<", now, e.get(until)), again, stop)
            e.b.position_at_end(stop)
            self._stop(other)
            e.b.position_at_end(again)
            with e.b.if_then(self._ask(asked)):
                # Without the yield, members that outnumber the CPUs would keep those they wait for from running.
                e.call("sched_yield", I32)
            e.b.branch(look)
            e.b.position_at_end(taken)

    def _ask(self, asked: ir.Value) -> ir.Value:
        """Asks for the memory ASKED bytes from `asked` on, and moves that on; whether there was none left to ask for."""
        e = self.e
        at = e.get(asked)
        none = e.b.icmp_signed(">=", at, self.word(Word.AHEAD_BYTES))
        with e.b.if_then(e.b.not_(none)):
            for line in range(0, ASKED, LINE):
                for begin in (Word.AHEAD, Word.AHEAD_TOO):
                    e.prefetch(e.at(self.word(begin), at, line))
            e.set(asked, e.at(at, self.word(Word.AHEAD_STEP)))
        return none

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
        self.e.store(taken, self.e.function.args[0], Word.TAKEN)
        self._take_time()
        self.e.b.ret_void()

    def _take_time(self) -> None:
        e = self.e
        member = self.word(Word.MEMBER)
        spent = e.b.sub(nanoseconds(e), self.begun)
        e.store(e.b.add(e.load(member, I64, Member.NANOSECONDS), spent), member, Member.NANOSECONDS)

    def _copy(self) -> None:
        e, width = self.e, self.word(Word.WIDTH)
        with e.loop(0, self.common(Member.SIZE)) as member:
            target = e.at(self.word(Word.TARGET), e.times(member, width))
            copy(e, target, e.at(self.slot(member), self.word(Word.SKIP)), width)

    def _sum(self, memory: ir.Type) -> None:
        """LANES numbers at a time, each group over all members; the last group may be smaller. memory: a group's type there."""
        e = self.e
        target, skip, width = self.word(Word.TARGET), self.word(Word.SKIP), self.word(Word.WIDTH)
        number = 2 if memory == HALVES else 4

        def total(at: ir.Value, load: Callable[[ir.Value], ir.Value]) -> ir.Value:
            def term(member: ir.Value) -> ir.Value:
                numbers = load(e.at(self.slot(member), skip, at))
                return e.widened(numbers) if memory == HALVES else numbers

            found = e.variable(term(e.integer(0)))
            with e.loop(1, self.common(Member.SIZE)) as member:
                e.set(found, e.b.fadd(e.get(found), term(member)))
            return e.rounded(e.get(found)) if memory == HALVES else e.get(found)

        whole = e.times(e.b.sdiv(width, e.integer(number * LANES)), number * LANES)
        with e.loop(0, whole, number * LANES) as at:
            e.store(total(at, lambda place: e.load(place, memory)), e.at(target, at))
        left = e.b.sdiv(e.b.sub(width, whole), e.integer(number))
        with e.b.if_then(e.b.icmp_signed(">", left, e.integer(0))):
            e.store_first(left, total(whole, lambda place: e.load_first(left, place, memory)), e.at(target, whole))
