"""Sums of bf16 arrays in one call."""

from functools import cache

import torch
from torch import Tensor

from rank_server.compiled.bfloat import store_rounded, widened
from rank_server.compiled.emitter import LANES, Emitter
from rank_server.compiled.row_call import RowCall, arguments, own_rows
from rank_server.compiled.translation import translate

PIECE = 2048
"""Numbers that a thread sums at a time."""


def total(parts: Tensor) -> Tensor | None:
    """parts [N, *s], on a CPU, N ≥ 1 → [*s]: ((x₀ + x₁) + x₂) + … in fp32, rounded once.

    None where they aren't bf16 and contiguous, or a part isn't a multiple of LANES numbers.
    """
    size = parts[0].numel()
    if parts.dtype != torch.bfloat16 or size % LANES or not parts.is_contiguous():
        return None
    out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    program()(-(-size // PIECE), parts.data_ptr(), out.data_ptr(), size, len(parts))
    return out


@cache
def program() -> RowCall:
    """The compiled program; takes a tenth of a second when it is first asked for."""
    e = Emitter("sums")
    pieces, parts, out, size, number = arguments(e, 5)
    with own_rows(e, pieces) as piece:
        first = e.times(piece, PIECE)
        with e.loop(first, e.least(e.at(first, PIECE), size), LANES) as at:
            place = e.at(parts, e.times(at, 2))
            found = e.variable(widened(e, place))
            with e.loop(1, number) as index:
                e.set(found, e.b.fadd(e.get(found), widened(e, e.at(place, e.times(index, size, 2)))))
            store_rounded(e, e.get(found), e.at(out, e.times(at, 2)))
    return RowCall(translate(e))
