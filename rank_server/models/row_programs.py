"""Programs for what a decoder does between its matrices, on bf16 rows; all arithmetic is fp32, rounded once.

Widths are multiples of LANES: see `fits`.
"""

from functools import cache

from llvmlite import ir

from rank_server.compiled.bfloat import store_rounded, widened
from rank_server.compiled.emitter import F32, LANES, VECTOR, Emitter
from rank_server.compiled.row_call import RowCall, arguments, own_rows
from rank_server.compiled.translation import translate

BYTES = 2


@cache
def rms_norm(eps: float) -> RowCall:
    """(rows, x, its row stride in bytes, weight, out, width): out [rows, width] = x / √(mean x² + eps) · weight."""
    e = Emitter("rms_norm")
    rows, x, stride, weight, out, width = arguments(e, 6)
    chunks = e.b.sdiv(width, e.integer(LANES))
    with own_rows(e, rows) as row:
        source, target = e.at(x, e.times(row, stride)), e.at(out, e.times(row, width, BYTES))
        scale = e.splat(_inverse_root(e, source, chunks, eps))
        with e.loop(0, chunks) as chunk:
            scaled = e.b.fmul(widened(e, source, chunk), scale)
            store_rounded(e, e.b.fmul(scaled, widened(e, weight, chunk)), target, chunk)
    return RowCall(translate(e))


@cache
def turn_heads(eps: float | None) -> RowCall:
    """(rows, heads, their row stride in bytes, cos, sin, head dim, query heads, KV heads, weights of the norms of both):

    Query and key heads of heads [rows, hq + 2·hk, D] are normed, unless eps is None, and turned, in place. cos and sin as of
    `Rotary.at`.
    """
    e = Emitter("turn_heads")
    rows, heads, stride, cosines, sines, width, queries, keys, query_norm, key_norm = arguments(e, 10)
    half = e.b.sdiv(width, e.integer(2))
    turned = e.at(queries, keys)
    with own_rows(e, rows) as row:
        cos, sin = (e.at(each, e.times(row, width, BYTES)) for each in (cosines, sines))
        with e.loop(0, turned) as head:
            low = e.at(heads, e.times(row, stride), e.times(head, width, BYTES))
            scale = norm = None
            if eps is not None:
                scale = e.splat(_inverse_root(e, low, e.b.sdiv(width, e.integer(LANES)), eps))
                norm = e.b.select(e.b.icmp_signed("<", head, queries), query_norm, key_norm)

            def read(
                at: ir.Value,
                low: ir.Value = low,
                scale: ir.Value | None = scale,
                norm: ir.Value | None = norm,
            ) -> ir.Value:
                value = widened(e, e.at(low, at))
                return value if norm is None else e.b.fmul(e.b.fmul(value, scale), widened(e, e.at(norm, at)))

            with e.loop(0, e.times(half, BYTES), LANES * BYTES) as first:
                second = e.at(first, e.times(half, BYTES))
                x, y = read(first), read(second)
                for at, same, other in ((first, x, y), (second, y, x)):
                    product = e.b.fmul(same, widened(e, e.at(cos, at)))
                    store_rounded(e, e.sum_of_products(other, widened(e, e.at(sin, at)), product), e.at(low, at))
    return RowCall(translate(e))


def _inverse_root(e: Emitter, x: ir.Value, chunks: ir.Value, eps: float) -> ir.Value:
    """1 / √(mean of squares + eps) of a row."""
    total = e.variable(e.number(0.0, VECTOR))
    with e.loop(0, chunks) as chunk:
        part = widened(e, x, chunk)
        e.set(total, e.sum_of_products(part, part, e.get(total)))
    count = e.b.sitofp(e.times(chunks, LANES), F32)
    mean = e.b.fdiv(e.across(e.get(total), e.b.fadd), count)
    return e.b.fdiv(e.number(1.0), e.intrinsic("sqrt", e.b.fadd(mean, e.number(eps))))
