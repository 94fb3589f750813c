"""A member's calls of the compiled round of a shared-memory group: made at once, or noted for a tape."""

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass

from rank_server.collectives.shm_program import ASKED, Member, Out, Word, program
from rank_server.collectives.shm_segment import Segment
from rank_server.compiled.tape import Reads, Recorder

MOST_AHEAD = 128 << 10
"""Bytes that a waiting member asks for at most: a part of the second cache of a core, and more than a wait's time brings."""


@dataclass(frozen=True, slots=True)
class Call:
    """An exchange of one member: its number of bytes and how they are read, see `Word`."""

    source: int
    target: int
    total: int
    skip: int
    width: int
    out: Out
    code: int


class Exchange:
    """The compiled rounds of one member. Holds addresses of a segment, which whoever calls must hold."""

    def __init__(self, segment: Segment, index: int) -> None:
        members = range(segment.size)
        others = [member for member in members if member != index]
        words = [
            *(0, 0, segment.size, index, segment.control_block(index)),
            *(segment.semaphore(index, other) for other in others),
            *(segment.semaphore(other, index) for other in others),
            *(segment.control_block(other) for other in others),
            *(segment.slot(half, member) for half in range(2) for member in members),
        ]
        self._member = (ctypes.c_int64 * len(words))(*words)
        self._member_at = ctypes.addressof(self._member)
        self._words = (ctypes.c_int64 * Word.SIZE)()
        self._pack = struct.Struct(f"={Word.SIZE}q").pack_into
        self._compiled = program()
        # Python's lock is given away: members may be threads of one process.
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._compiled.address)

    @property
    def rounds(self) -> int:
        """Completed so far."""
        return self._member[Member.ROUNDS]

    @rounds.setter
    def rounds(self, number: int) -> None:
        self._member[Member.ROUNDS] = number

    @property
    def seconds(self) -> float:
        """Spent in calls so far."""
        return 1e-9 * self._member[Member.NANOSECONDS]

    def __call__(self, call: Call) -> bool:
        """The next round: shows `total` bytes at `source`, and writes to `target` what becomes of each member's `width` bytes
        from `skip` on. False where it stopped with `taken` posts; then nothing was written, and `finish` is to follow."""
        self._fill(self._words, call)
        self._run(self._words)
        return self._words[Word.DONE] == 1

    @property
    def taken(self) -> int:
        """Posts taken by a call that stopped: those of the first so many others."""
        return self._words[Word.TAKEN]

    def finish(self) -> None:
        """Writes the result of the call that stopped, once all others are known to have shown their parts."""
        self._words[Word.READ_ONLY] = 1
        self._run(self._words)

    def note(self, notes: Recorder, call: Call, resume: Callable[[], None]) -> None:
        """Notes the call for a tape. resume: completes it where it stopped, by `taken` and `finish`."""
        words = (ctypes.c_int64 * Word.SIZE)()
        self._fill(words, call)

        def ask_for(reads: Reads) -> None:
            first, *second = reads.begins
            step = ASKED if second else 2 * ASKED
            words[Word.AHEAD], words[Word.AHEAD_TOO] = first, second[0] if second else first + ASKED
            words[Word.AHEAD_STEP], words[Word.AHEAD_BYTES] = step, min(reads.size, MOST_AHEAD // len(reads.begins))

        def resume_here() -> None:
            ctypes.memmove(self._words, words, ctypes.sizeof(words))
            resume()

        notes.note_stopping(self._compiled, ctypes.addressof(words), (words, self._member), resume_here, ask_for)

    def _fill(self, words: "ctypes.Array[ctypes.c_int64]", call: Call) -> None:
        given = call.source, call.target, call.total, call.skip, call.width, call.out, call.code
        nothing_ahead = 0, 0, 0, 0
        self._pack(words, 0, 0, 0, 0, self._member_at, *given, *nothing_ahead)
