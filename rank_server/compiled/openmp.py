"""Threads for compiled kernels: those of the OpenMP runtime that torch brings.

A second pool would fight with the first one for the cores, since OpenMP's threads spin for a while when their work is done.
GOMP_parallel and GOMP_barrier are what code compiled by GCC calls; the runtimes of LLVM and Intel have them too.
"""

import ctypes
from collections.abc import Callable
from functools import cache

Run = Callable[[int, int | bytes, int], object]
"""(address of a C function of one address, that address or what lies there, threads): calls it on each of at most so many
threads at a time."""


@cache
def parallel() -> Run | None:
    """The runtime of this process; None where torch has not loaded one. Then a function is called as by one thread of one."""
    process = ctypes.CDLL(None)
    if not all(
        hasattr(process, name) for name in ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
    ):
        return None
    run = process.GOMP_parallel
    run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return lambda function, argument, threads: run(function, argument, threads, 0)


def serial(function: int, argument: int | bytes, threads: int) -> None:
    """A `Run` of one thread, whatever is asked for."""
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
