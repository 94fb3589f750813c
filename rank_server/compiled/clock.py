"""Time in compiled programs."""

import time

from llvmlite import ir

from rank_server.compiled.emitter import I32, I64, POINTER, Emitter

NS = 10**9
"""Nanoseconds of a second."""


def nanoseconds(e: Emitter) -> ir.Value:
    """On the clock that never steps: what `time.monotonic_ns` counts."""
    seconds_nanoseconds = e.array(1)
    e.call("clock_gettime", I32, ir.Constant(I32, time.CLOCK_MONOTONIC), e.b.inttoptr(seconds_nanoseconds, POINTER))
    return e.at(e.times(e.load(seconds_nanoseconds, I64), NS), e.load(seconds_nanoseconds, I64, 1))
