"""What partials go through between other programs, each as one compiled call: out‖lse in one piece, and rounding to bf16."""

from functools import cache

import torch
from torch import Tensor

from rank_server.compiled.bfloat import store_rounded
from rank_server.compiled.emitter import F32, LANES, VECTOR, Emitter
from rank_server.compiled.row_call import RowCall, arguments, own_rows
from rank_server.compiled.translation import translate


def packed(out: Tensor, lse: Tensor) -> Tensor:
    """out [*s, D] and lse [*s], fp32 → [*s, D + 1]."""
    width = out.shape[-1]
    if not _suits(out) or width % LANES or lse.dtype != torch.float32 or not lse.is_contiguous():
        return torch.cat([out, lse.unsqueeze(-1)], dim=-1)
    both = out.new_empty((*lse.shape, width + 1))
    _packing()(lse.numel(), out.data_ptr(), lse.data_ptr(), both.data_ptr(), width)
    return both


def rounded(out: Tensor, dtype: torch.dtype) -> Tensor:
    """out [*s, D], fp32, in the given dtype; may be `out` itself."""
    width = out.shape[-1]
    if dtype != torch.bfloat16 or not _suits(out) or width % LANES:
        return out.to(dtype)
    result = out.new_empty(out.shape, dtype=dtype)
    _rounding()(out.numel() // width if width else 0, out.data_ptr(), result.data_ptr(), width)
    return result


def warm_up() -> None:
    """Compiles both; else it is done when needed."""
    _packing()
    _rounding()


def _suits(out: Tensor) -> bool:
    return out.is_cpu and out.dtype == torch.float32 and out.is_contiguous()


@cache
def _packing() -> RowCall:
    e = Emitter("pack")
    rows, out, lse, target, width = arguments(e, 5)
    with own_rows(e, rows) as row:
        source, both = e.at(out, e.times(row, width, 4)), e.at(target, e.times(row, e.at(width, 1), 4))
        with e.loop(0, e.b.sdiv(width, e.integer(LANES))) as chunk:
            e.store(e.load(source, VECTOR, chunk), both, chunk)
        e.store(e.load(lse, F32, row), both, width)
    return RowCall(translate(e))


@cache
def _rounding() -> RowCall:
    e = Emitter("round")
    rows, source, target, width = arguments(e, 4)
    with own_rows(e, rows) as row:
        first = e.times(row, width)
        with e.loop(0, e.b.sdiv(width, e.integer(LANES))) as chunk:
            at = e.at(first, e.times(chunk, LANES))
            store_rounded(e, e.load(e.at(source, e.times(at, 4))), e.at(target, e.times(at, 2)))
    return RowCall(translate(e))
