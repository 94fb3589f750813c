"""bfloat16 in memory, fp32 in registers."""

from llvmlite import ir

from rank_server.compiled.emitter import HALVES, Emitter


def widened(e: Emitter, address: ir.Value, index: ir.Value | int = 0) -> ir.Value:
    """Numbers LANES·index … of an array of bf16, as fp32."""
    return e.widened(e.load(address, HALVES, index))


def store_rounded(e: Emitter, value: ir.Value, address: ir.Value, index: ir.Value | int = 0) -> None:
    """LANES fp32 numbers → numbers LANES·index … of an array of bf16, to the nearest, ties to even; NaN stays NaN."""
    e.store(e.rounded(value), address, index)
