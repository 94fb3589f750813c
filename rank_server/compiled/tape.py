"""Calls of compiled programs, recorded once and made again by one call.

A pass over few rows is hundreds of calls of some microseconds each, and what Python does between them takes about as long as
they do. While a `Recorder` is at work, every program that this thread calls is noted with its argument; the `Tape` makes the
same calls again, with the same arguments: they read and write the same memory, whose contents are what changes.

What else would happen in between can't be seen on the tape. So torch's operations may do nothing but take memory and look at
it in another way; anything else refuses the recording, as does an exchange between ranks that isn't one compiled call.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from llvmlite import ir
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rank_server.compiled.clock import NS, nanoseconds
from rank_server.compiled.emitter import I32, I64, POINTER, Emitter
from rank_server.compiled.openmp import parallel
from rank_server.compiled.translation import Compiled, translate

_TAKING = frozenset(f"aten::{name}" for name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"))
"""Operations that take memory and leave in it what is there."""
_MADE = "aten::lift_fresh"
"""What is seen of a tensor that is made of Python's numbers: they would be the same in every run, and nobody holds them."""
ALONE = 0
"""In the place of a number of threads: the call is made on the caller's thread."""
BREATH_S = 0.25
"""After so long a tape tells that it gets on, as soon as the call that it makes is over."""
_HEAD, _OF_A_CALL = 4, 4
"""Words of a tape: calls, the call to begin with, an answer, and when to answer at the latest, in nanoseconds; then of each
call its function, its argument, the threads, and whether it may stop."""
_BEGIN, _ANSWER, _DUE = 1, 2, 3
_ALL_MADE, _TIME_IS_UP = -1, -2
"""Answers; another one is the number of the call that stopped. When the time is up, _BEGIN says where to go on."""

_here = threading.local()


class NotRecordable(RuntimeError):
    """Something happened that a tape would leave out; says what."""


@dataclass(frozen=True, slots=True)
class Reads:
    """Memory that a call reads from its beginning on: one range, or two at the same time."""

    begins: tuple[int, ...]
    """Addresses."""
    size: int
    """Bytes of each."""


@dataclass(slots=True)
class Recorder:
    """What is noted of one thread's calls, in order."""

    calls: list[tuple[int, int, int, bool]] = field(default_factory=list)
    held: list[object] = field(default_factory=list)
    """Whatever the calls have addresses of."""
    resumes: dict[int, Callable[[], None]] = field(default_factory=dict)
    """By call that may stop, what goes on from there."""
    reads: dict[int, Reads] = field(default_factory=dict)
    """By call, if that is known."""
    waits: dict[int, Callable[[Reads], None]] = field(default_factory=dict)
    """By call that may have to wait, what tells it which memory to ask for meanwhile."""
    followers: dict[object, Callable[[Any], None]] = field(default_factory=dict)
    """Called before the tape runs, with what it runs for; by something of whoever noted it, to note it once."""
    checks: list[Callable[[], None]] = field(default_factory=list)
    """Called when it has run."""
    exchanges: dict[Callable[[int], AbstractContextManager[None]], int] = field(default_factory=dict)
    """What surrounds a run, given how many of the calls are its: one per group of ranks."""
    refusal: str = ""

    def note(self, program: Compiled, argument: int, held: object, threads: int = ALONE, reads: Reads | None = None) -> None:
        """A call of a program; argument: the address that it is given, of something that `held` keeps; threads: of a team, at
        most so many; reads: what it begins to read with, if it is worth asking for it before."""
        if reads is not None:
            self.reads[len(self.calls)] = reads
        self.held += (program, held)
        self.calls.append((program.address, argument, threads, False))

    def note_stopping(
        self,
        program: Compiled,
        argument: int,
        held: object,
        resume: Callable[[], None],
        ask_for: Callable[[Reads], None],
    ) -> None:
        """A call whose argument begins with a word that is 0 where it has stopped; then `resume` is called, to complete it.
        ask_for: is told, once, what is read next: what may be asked for while the call waits."""
        self.resumes[len(self.calls)] = resume
        self.waits[len(self.calls)] = ask_for
        self.held += (program, held)
        self.calls.append((program.address, argument, ALONE, True))

    def refuse(self, what: str) -> None:
        """A tape would leave this out."""
        self.refusal = self.refusal or what

    def tape(self) -> "Tape":
        """Of all that was noted; raises NotRecordable."""
        if self.refusal:
            raise NotRecordable(self.refusal)
        coming: Reads | None = None
        for number in reversed(range(len(self.calls))):
            coming = self.reads.get(number, coming)
            if number in self.waits:
                if coming is not None:
                    self.waits[number](coming)
                # What is read behind another wait may be asked for there, when less has come in between.
                coming = None
        return Tape(self)


def recorder() -> Recorder | None:
    """The one that is at work on this thread."""
    found: Recorder | None = getattr(_here, "recorder", None)
    return found


@contextmanager
def recording() -> Iterator[Recorder]:
    """Notes what this thread calls, besides calling it; not to be nested."""
    assert recorder() is None, "a tape is being recorded already"
    _here.recorder = Recorder()
    try:
        with _OnlyMemory(_here.recorder):
            yield _here.recorder
    finally:
        _here.recorder = None


class _OnlyMemory(TorchDispatchMode):
    """Refuses what does more, and holds all memory that is taken."""

    def __init__(self, to: Recorder) -> None:
        super().__init__()
        self._to = to

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to be skipped by torch's compiler costs an import of 80 MB and a second, and there is nothing to compile here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        if name in _TAKING:
            self._to.held.append(result)
        elif name == _MADE or func._schema.is_mutable or not _looks_at(args[0] if args else None, result):
            self._to.refuse(name)
        return result


def _looks_at(x: object, result: object) -> bool:
    """Whether a result is nothing but memory of x."""
    parts = result if isinstance(result, list | tuple) else (result,)
    tensors = [part for part in (x, *parts) if isinstance(part, Tensor)]
    return len(tensors) == 1 + len(parts) and len({each.untyped_storage().data_ptr() for each in tensors}) == 1


class Tape:
    """Recorded calls. Holds what they have addresses of."""

    def __init__(self, recorded: Recorder) -> None:
        self._recorded = recorded
        words = [word for call in recorded.calls for word in call]
        self._words = (ctypes.c_int64 * (_HEAD + len(words)))(len(recorded.calls), 0, _ALL_MADE, 0, *words)
        self._program = _program()
        # Python's lock is given away: members of a group may be threads of one process.
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._program.address)

    def __len__(self) -> int:
        return len(self._recorded.calls)

    def run(
        self,
        given: object = None,
        progress: Callable[[], None] = lambda: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes the calls; given: what followers are told; progress: is called every BREATH_S or so while it runs; meanwhile:
        is called right before, for what other threads of Python may do until it is over.

        Raises what followers, resumed calls and checks raise.
        """
        recorded, words = self._recorded, self._words
        for follow in recorded.followers.values():
            follow(given)
        with ExitStack() as around:
            for exchange, count in recorded.exchanges.items():
                around.enter_context(exchange(count))
            words[_BEGIN] = 0
            meanwhile()
            while True:
                words[_DUE] = time.monotonic_ns() + round(BREATH_S * NS)
                self._run(words)
                answer = words[_ANSWER]
                if answer == _ALL_MADE:
                    break
                if answer != _TIME_IS_UP:
                    recorded.resumes[answer]()
                    words[_BEGIN] = answer + 1
                progress()
        for check in recorded.checks:
            check()


@cache
def _program() -> Compiled:
    e = Emitter("tape")
    words = e.function.args[0]
    count, begin, due = (e.load(words, I64, index) for index in (0, _BEGIN, _DUE))
    e.store(e.integer(_ALL_MADE), words, _ANSWER)
    with e.loop(begin, count) as number:
        first = e.at(e.times(number, _OF_A_CALL), _HEAD)
        function, argument, threads, stops = (e.load(words, I64, e.at(first, index)) for index in range(_OF_A_CALL))
        if parallel() is None:
            _call(e, function, argument)
        else:
            with e.b.if_else(e.b.icmp_signed("==", threads, e.integer(ALONE))) as (alone, together):
                with alone:
                    _call(e, function, argument)
                with together:
                    pointers = (e.b.inttoptr(each, POINTER) for each in (function, argument))
                    e.call("GOMP_parallel", ir.VoidType(), *pointers, e.b.trunc(threads, I32), ir.Constant(I32, 0))
        may_stop = e.b.icmp_signed("!=", stops, e.integer(0))
        with e.b.if_then(may_stop), _return_if(e, e.b.icmp_signed("==", e.load(argument, I64), e.integer(0))):
            e.store(number, words, _ANSWER)
        with _return_if(e, e.b.icmp_signed(">=", nanoseconds(e), due)):
            e.store(e.at(number, 1), words, _BEGIN)
            e.store(e.integer(_TIME_IS_UP), words, _ANSWER)
    return translate(e)


@contextmanager
def _return_if(e: Emitter, condition: ir.Value) -> Iterator[None]:
    """What is written in its context is done before the program ends there."""
    leave, stay = (e.function.append_basic_block(name) for name in ("leave", "stay"))
    e.b.cbranch(condition, leave, stay)
    e.b.position_at_end(leave)
    yield
    e.b.ret_void()
    e.b.position_at_end(stay)


def _call(e: Emitter, function: ir.Value, argument: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I64])
    e.b.call(e.b.inttoptr(function, kind.as_pointer()), [argument])
