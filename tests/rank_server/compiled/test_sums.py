"""Sums in member order, bit for bit against torch's."""

import pytest
import torch

from rank_server.compiled.row_call import FEW_ROWS
from rank_server.compiled.sums import PIECE, total


def in_turn(parts):
    found = parts[0].float()
    for part in parts[1:]:
        found += part
    return found.to(torch.bfloat16)


def numbers(*shape):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 30).to(torch.bfloat16)


@pytest.mark.parametrize("members", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(16,), (1, 576), (7, 48), (PIECE,), (PIECE + 16,), (FEW_ROWS + 3, PIECE), (0, 16)])
def test_sums_are_those_of_torch(members, shape):
    parts = numbers(members, *shape)
    kept = parts.clone()
    got = total(parts)
    assert got.shape == shape
    assert torch.equal(got, in_turn(parts))
    assert torch.equal(parts, kept)


def test_the_order_is_that_of_members():
    parts = torch.tensor([1e30, 1.0, -1e30, 3.0]).to(torch.bfloat16)[:, None].expand(-1, 16).contiguous()
    assert total(parts).tolist() == [3.0] * 16
    assert total(parts[[0, 2, 1, 3]]).tolist() == [4.0] * 16


def test_what_is_not_finite_is_seen():
    parts = numbers(2, 32)
    parts[1, 3], parts[0, 20] = torch.nan, torch.inf
    got = total(parts)
    assert got[3].isnan()
    assert got[20] == torch.inf
    assert int(got.isfinite().sum()) == 30


@pytest.mark.parametrize(
    "parts",
    [torch.zeros(2, 16), torch.zeros(2, 15).bfloat16(), torch.zeros(16, 32).bfloat16().T],
    ids=["fp32", "15 numbers", "columns"],
)
def test_what_it_cannot_sum_is_left_to_others(parts):
    assert total(parts) is None
