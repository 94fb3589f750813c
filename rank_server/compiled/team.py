"""Who runs a compiled program: all of OpenMP's threads together, or its caller alone."""

import ctypes
from dataclasses import dataclass

import torch
from llvmlite import ir

from rank_server.compiled.emitter import I32, I64, Emitter
from rank_server.compiled.openmp import Run, parallel, serial
from rank_server.compiled.tape import ALONE, Reads, recorder
from rank_server.compiled.translation import Compiled


@dataclass(frozen=True, slots=True)
class Team:
    """Runs programs that were written for it."""

    together: bool
    _run: Run

    @classmethod
    def of(cls, together: bool | None = None) -> "Team":
        """together: None = where OpenMP's threads are found; ValueError where they are wanted and aren't there."""
        found = parallel()
        if found is None and together:
            raise ValueError("a team of threads is wanted, but torch has brought no OpenMP runtime")
        return cls(False, serial) if found is None or together is False else cls(True, found)

    def call(
        self, program: Compiled, argument: int | bytes, threads: int, held: object = None, reads: Reads | None = None
    ) -> None:
        """Runs a program on at most so many threads, given an address, of something that `held` keeps, or that of the bytes.
        reads: what it begins to read with, if it is worth asking for it before."""
        if (notes := recorder()) is not None:
            at, held = _lasting(argument) if isinstance(argument, bytes) else (argument, held)
            notes.note(program, at, held, threads if self.together else ALONE, reads)
        self._run(program.address, argument, threads)

    @property
    def threads(self) -> int:
        """At most so many run a program at a time."""
        return torch.get_num_threads() if self.together else 1


def _lasting(argument: bytes) -> tuple[int, object]:
    copy = ctypes.create_string_buffer(argument, len(argument))
    return ctypes.addressof(copy), copy


def thread_of(e: Emitter, together: bool) -> tuple[ir.Value, ir.Value]:
    """Number of the thread that runs the program, and how many run it; (0, 1) for one that is run alone."""
    if not together:
        return e.integer(0), e.integer(1)
    number, size = (e.b.sext(e.call(f"omp_get_{name}", I32), I64) for name in ("thread_num", "num_threads"))
    return number, size


def share_of(e: Emitter, items: ir.Value, thread: ir.Value, size: ir.Value) -> tuple[ir.Value, ir.Value]:
    """First and last + 1 of a thread's items, all threads having near-equal runs of them."""
    first, last = (e.b.sdiv(e.times(items, each), size) for each in (thread, e.at(thread, 1)))
    return first, last
