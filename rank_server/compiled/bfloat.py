"""bfloat16 in memory, fp32 in registers: an address of bf16 numbers, LANES of them at a time."""

from llvmlite import ir

from rank_server.compiled.emitter import HALVES, LANES, VECTOR, WORDS, Emitter

NAN = 0x7FC0


def widened(e: Emitter, address: ir.Value, index: ir.Value | int = 0) -> ir.Value:
    """Numbers LANES·index … of an array, as fp32."""
    words = e.b.zext(e.load(address, HALVES, index), WORDS)
    return e.b.bitcast(e.b.shl(words, _all(16)), VECTOR)


def store_rounded(e: Emitter, value: ir.Value, address: ir.Value, index: ir.Value | int = 0) -> None:
    """fp32 → numbers LANES·index … of an array, to the nearest, ties to even; NaN stays NaN."""
    words = e.b.bitcast(value, WORDS)
    # Half of the last place, less one where that is even: what carries over is what rounds up.
    odd = e.b.and_(e.b.lshr(words, _all(16)), _all(1))
    rounded = e.b.lshr(e.b.add(words, e.b.add(odd, _all(0x7FFF))), _all(16))
    kept = e.b.select(e.b.fcmp_unordered("uno", value, value), _all(NAN), rounded)
    e.store(e.b.trunc(kept, HALVES), address, index)


def _all(word: int) -> ir.Constant:
    return ir.Constant(WORDS, [word] * LANES)
