"""Packing and rounding of partials: the bits of torch's operations, wherever a program takes their place."""

import pytest
import torch

from rank_server.attention import move_program
from rank_server.attention.move_program import packed, rounded

SHAPES = [(1, 9, 64), (3, 2, 16), (40, 1, 32), (0, 4, 16), (2, 3, 24), (2, 3, 0)]
"""Widths of programs and others; more than 32 rows are dealt out to threads."""


def partial(*shape: int):
    random = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=random) * 100, torch.randn(shape[:-1], generator=random)


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_is_out_and_lse_side_by_side(shape):
    out, lse = partial(*shape)
    if lse.numel():
        lse.view(-1)[0] = -torch.inf
    both = packed(out, lse)
    assert torch.equal(both[..., :-1], out) and torch.equal(both[..., -1], lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_rounded_is_to_the_nearest(shape, dtype):
    out, _ = partial(*shape)
    assert torch.equal(rounded(out, dtype), out.to(dtype))


def test_whatever_does_not_lie_in_one_piece_is_taken_too():
    out, lse = partial(2, 3, 32)
    for view, of in ((out[:, :, :16], lse), (out.transpose(0, 1), lse.t())):
        assert torch.equal(packed(view, of), torch.cat([view, of.unsqueeze(-1)], -1))
        assert torch.equal(rounded(view, torch.bfloat16), view.to(torch.bfloat16))


def test_programs_take_the_widths_of_heads(monkeypatch):
    calls = []
    for name in ("_packing", "_rounding"):
        real = getattr(move_program, name)
        monkeypatch.setattr(move_program, name, lambda real=real: (calls.append(1), real())[1])
    out, lse = partial(1, 2, 64)
    packed(out, lse), rounded(out, torch.bfloat16)
    assert len(calls) == 2
