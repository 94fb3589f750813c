"""Instructions of processors that multiply bf16 numbers in vectors of 512 bits, for an `Emitter`.

A word is a pair of bf16 numbers in 32 bits, the first one in the lower half; a vector of words has LANES of them.
"""

from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir

from rank_server.compiled.emitter import BF16, I16, I32, LANES, VECTOR, WORDS, Emitter

_NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16")


_NUMBERS = ir.VectorType(BF16, 2 * LANES)
_HALVES = ir.VectorType(I16, 2 * LANES)
ONES = 0x3F803F80
"""A word of two ones."""


@cache
def available() -> bool:
    """Whether this processor has these instructions."""
    features = llvm.get_host_cpu_features()
    return all(features.get(name, False) for name in _NEEDED)


def add_products(e: Emitter, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """total + x₀·y₀ + x₁·y₁ in each lane, fp32; x, y: vectors of words. Subnormal numbers count as 0."""
    return _call(e, "avx512bf16.dpbf16ps.512", VECTOR, total, *(e.b.bitcast(each, _NUMBERS) for each in (x, y)))


def words(e: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
    """Two vectors of fp32 numbers, each rounded to the nearest bf16 number (ties to even), as lower and upper halves."""
    rounded = _call(e, "avx512bf16.cvtne2ps2bf16.512", _NUMBERS, high, low)
    order = [half for lane in range(LANES) for half in (lane, LANES + lane)]
    halves = e.b.bitcast(rounded, _HALVES)
    return e.b.bitcast(e.b.shuffle_vector(halves, halves, ir.Constant(ir.VectorType(I32, 2 * LANES), order)), WORDS)


def times_power_of_two(e: Emitter, x: ir.Value, n: ir.Value) -> ir.Value:
    """x·2^⌊n⌋ in each lane, fp32; 0 and infinity where it leaves the range; NaN of NaN, but 0 of any x and n = −inf."""
    mask, rounding = ir.Constant(I16, -1), ir.Constant(I32, 4)
    return _call(e, "avx512.mask.scalef.ps.512", VECTOR, x, n, ir.Constant(VECTOR, ir.Undefined), mask, rounding)


def _call(e: Emitter, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    name = f"llvm.x86.{name}"
    signature = ir.FunctionType(result, [each.type for each in arguments])
    return e.b.call(e.module.globals.get(name) or ir.Function(e.module, signature, name), arguments)
