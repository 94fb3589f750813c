"""Programs over the rows of a batch: few rows on the caller's thread, many dealt out to all threads.

What a row's result is must not depend on which thread has it.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from llvmlite import ir

from rank_server.compiled.emitter import I64, Emitter
from rank_server.compiled.openmp import parallel
from rank_server.compiled.tape import ALONE, recorder
from rank_server.compiled.team import share_of, thread_of
from rank_server.compiled.translation import Compiled

FEW_ROWS = 32
"""So many rows are done before other threads have begun."""


class RowCall:
    """The translation of a program that was written with `arguments` and `own_rows`."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        # Python's lock is kept: to give it away and get it back takes longer than few rows.
        self._alone = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(compiled.address)
        self._together = parallel()

    def __call__(self, rows: int, *arguments: int) -> None:
        """arguments: the others of the program."""
        call = (ctypes.c_int64 * (1 + len(arguments)))(rows, *arguments)
        threads = ALONE if rows <= FEW_ROWS or self._together is None else torch.get_num_threads()
        if (notes := recorder()) is not None:
            notes.note(self._compiled, ctypes.addressof(call), call, threads)
        if threads == ALONE or self._together is None:
            self._alone(call)
        else:
            self._together(self._compiled.address, ctypes.addressof(call), threads)


def arguments(e: Emitter, count: int) -> list[ir.Value]:
    """The program's arguments, 64-bit integers: the number of rows first."""
    return [e.load(e.function.args[0], I64, index) for index in range(count)]


@contextmanager
def own_rows(e: Emitter, rows: ir.Value) -> Iterator[ir.Value]:
    """Loop over the rows of the thread that runs the program; yields the row's number."""
    with e.loop(*share_of(e, rows, *thread_of(e, parallel() is not None))) as row:
        yield row
