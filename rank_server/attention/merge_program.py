"""The merge of partials as one compiled program over rows: what takes torch some twenty operations."""

from collections.abc import Sequence
from functools import cache
from math import prod

import torch
from llvmlite import ir
from torch import Tensor

from rank_server.compiled.emitter import F32, I64, LANES, VECTOR, Emitter
from rank_server.compiled.exponential import exponential
from rank_server.compiled.row_call import RowCall, arguments, own_rows
from rank_server.compiled.translation import translate

_GIVEN, _OF_A_PARTIAL = 5, 4
"""Arguments: rows, width, number of partials, addresses of the merged out and lse; then of each partial the address of out, the
distance of its rows in bytes, and the same of lse."""
LEAST = -87.0
"""Sets of keys that weigh less than e to this power count as empty."""


def merge(outs: Tensor | Sequence[Tensor], lses: Tensor) -> tuple[Tensor, Tensor] | None:
    """See `merge_partials`; None where widths aren't multiples of LANES, dtypes not fp32, shapes not alike, or rows not at
    equal distances."""
    *rows, width = outs[0].shape
    if width % LANES or lses.dtype != torch.float32 or len(outs) != len(lses) or lses.shape[1:] != (*rows,):
        return None
    places: list[int] = []
    lse_step, step = _distance(lses.shape[1:], lses.stride()[1:]), None
    for index in range(len(lses)):
        if step is None or not isinstance(outs, Tensor):
            first = outs[index]
            step = _distance(rows, first.stride()[:-1])
            if first.dtype != torch.float32 or first.stride(-1) != 1 or first.shape != (*rows, width):
                return None
        if step is None or lse_step is None:
            return None
        at = outs.data_ptr() + 4 * index * outs.stride(0) if isinstance(outs, Tensor) else first.data_ptr()
        places += (at, 4 * step, lses.data_ptr() + 4 * index * lses.stride(0), 4 * lse_step)
    out = torch.empty((*rows, width), dtype=torch.float32, device=lses.device)
    lse = torch.empty(rows, dtype=torch.float32, device=lses.device)
    program()(lse.numel(), width, len(lses), out.data_ptr(), lse.data_ptr(), *places)
    return out, lse


def merge_packed(packed: Tensor) -> Tensor | None:
    """packed [N, *s, D + 1], out‖lse of each row → out [*s, D]; None as `merge`, and where they aren't contiguous.

    Where rows lie follows from the shape: of a few rows, that is found out in a third of the time.
    """
    number, *shape, both = packed.shape
    width, rows, step = both - 1, prod(shape), 4 * both
    if width % LANES or packed.dtype != torch.float32 or not packed.is_contiguous():
        return None
    out, lse = packed.new_empty((*shape, width)), packed.new_empty(rows)
    places: list[int] = []
    for at in range(packed.data_ptr(), packed.data_ptr() + number * rows * step, rows * step or 1):
        places += (at, step, at + 4 * width, step)
    program()(rows, width, number, out.data_ptr(), lse.data_ptr(), *places)
    return out


def _distance(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """Between rows that are numbered over all dimensions; None where it varies."""
    distance, following = 0, None
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if following is None:
            distance = stride
        elif stride != following:
            return None
        following = stride * size
    return distance


@cache
def program() -> RowCall:
    """The compiled program; takes some tenths of a second when it is first asked for."""
    e = Emitter("merge")
    rows, width, number, out, merged_lse = arguments(e, _GIVEN)
    none = e.number(float("-inf"))

    def partial(index: ir.Value, row: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Address of out, and lse."""
        first = e.at(e.times(index, _OF_A_PARTIAL), _GIVEN)
        at, step, lse_at, lse_step = (e.load(e.function.args[0], I64, e.at(first, i)) for i in range(_OF_A_PARTIAL))
        return e.at(at, e.times(row, step)), e.load(e.at(lse_at, e.times(row, lse_step)), F32)

    def weight(lse: ir.Value, highest: ir.Value) -> ir.Value:
        distance = e.b.fsub(lse, highest)
        return e.b.select(e.b.fcmp_ordered("<", distance, e.number(LEAST)), e.number(0.0), exponential(e, distance))

    with own_rows(e, rows) as row:
        top, total = e.variable(none), e.variable(e.number(0.0))
        with e.loop(0, number) as index:
            e.set(top, e.greatest(partial(index, row)[1], e.get(top)))
        highest = e.b.select(e.b.fcmp_ordered("==", e.get(top), none), e.number(0.0), e.get(top))
        with e.loop(0, number) as index:
            e.set(total, e.b.fadd(e.get(total), weight(partial(index, row)[1], highest)))
        e.store(e.b.fadd(highest, e.intrinsic("log", e.get(total))), merged_lse, row)
        divisor = e.b.select(e.b.fcmp_ordered("==", e.get(total), e.number(0.0)), e.number(1.0), e.get(total))
        target = e.at(out, e.times(row, width, 4))
        with e.loop(0, number) as index:
            source, lse = partial(index, row)
            share = e.b.fdiv(weight(lse, highest), divisor)
            empty = e.splat(e.b.fcmp_ordered("==", share, e.number(0.0)))
            first = e.splat(e.b.icmp_signed("==", index, e.integer(0)))
            with e.loop(0, e.b.sdiv(width, e.integer(LANES))) as chunk:
                zero = e.number(0.0, VECTOR)
                term = e.b.select(empty, zero, e.b.fmul(e.load(source, VECTOR, chunk), e.splat(share)))
                before = e.b.select(first, zero, e.load(target, VECTOR, chunk))
                e.store(e.b.fadd(before, term), target, chunk)
    return RowCall(translate(e))
