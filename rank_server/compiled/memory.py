"""Bytes from one place to another, for an `Emitter`."""

from llvmlite import ir

from rank_server.compiled.emitter import POINTER, Emitter


def copy(e: Emitter, target: ir.Value, source: ir.Value, size: ir.Value) -> None:
    """So many bytes; the places must not overlap."""
    volatile = ir.Constant(ir.IntType(1), 0)
    places = (e.b.inttoptr(each, POINTER) for each in (target, source))
    e.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), *places, size, volatile)
