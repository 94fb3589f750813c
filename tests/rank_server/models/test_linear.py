"""A matrix, its parts and its fused products, plain and packed."""

from itertools import pairwise

import pytest
import torch

from rank_server.models import linear
from rank_server.models.linear import DenseLinear, PackedLinear, packs, portions

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(1, 5), (7, 33), (100, 64), (130, 48)]
packable = pytest.mark.skipif(
    not packs(torch.empty(1, 1, dtype=torch.bfloat16)), reason="the CPU has no bfloat16 products in torch's oneDNN"
)


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Within one rounding of the result and a few of the sums."""
    assert got.dtype == dtype
    assert got.shape == exact.shape
    relative = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    assert ((got.double() - exact).abs() <= relative * (exact.abs() + 1)).all()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_products_and_what_is_fused_with_them(dtype, rows, n, k, biased):
    weight, bias = matrix(n, k, dtype), matrix(1, n, dtype, 1)[0] if biased else None
    x, other = matrix(rows, k, dtype, 2), matrix(rows, n, dtype, 3)
    kept = x.clone(), other.clone()
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    (whole,) = portions(weight, bias, "rows", 1).whole
    near(whole(x), exact, dtype)
    near(whole.plus(x, other), other.double() + exact, dtype)
    for got, want in (
        (whole.silu(x), torch.nn.functional.silu(exact)),
        (whole.times(x, other), other.double() * exact),
    ):
        # A rounding of the product comes before: its share of the result is not larger than that of the factor.
        assert ((got.double() - want).abs() <= {torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype] * (want.abs() + 1)).all()
    assert torch.equal(x, kept[0])
    assert torch.equal(other, kept[1])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_parts_together_are_the_whole(dtype, parts, axis):
    """Seven rows or columns over eight parts leave one without any."""
    n, k = (7, 33) if axis == "rows" else (33, 7)
    weight, bias = matrix(n, k, dtype), matrix(1, n, dtype, 1)[0] if axis == "rows" else None
    x = matrix(4, k, dtype, 2)
    cut = portions(weight, bias, axis, parts)
    assert len(cut.parts) == parts
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for pieces in (cut.parts, cut.whole):
        if axis == "rows":
            got = torch.cat([piece(x) for piece in pieces], 1)
        else:
            starts = [i * k // len(pieces) for i in range(len(pieces) + 1)]
            columns = [x[:, first:last] for first, last in pairwise(starts)]
            got = sum(piece(mine).double() for piece, mine in zip(pieces, columns, strict=True))
        assert ((got.double() - exact).abs() <= {torch.float32: 1e-5, torch.bfloat16: 2**-4}[dtype] * (exact.abs() + 1)).all()


def test_parts_of_a_plain_matrix_are_views():
    weight, bias = matrix(7, 12, torch.float32), matrix(1, 7, torch.float32)[0]
    for part in (*portions(weight, bias, "rows", 3).parts, *portions(weight, None, "columns", 5).parts):
        assert isinstance(part, DenseLinear)
        assert part.weight.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


@packable
def test_a_packed_matrix_is_held_once():
    cut = portions(matrix(128, 64, torch.bfloat16), None, "columns", 2)
    assert all(isinstance(part, PackedLinear) for part in cut.parts)
    assert cut.whole is cut.parts
    assert sum(part.packed.nbytes for part in cut.parts) == 128 * 64 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_bfloat16_is_packed(dtype):
    assert not packs(torch.empty(2, 2, dtype=dtype))
    assert not packs(torch.empty(2, 2, dtype=torch.bfloat16, device="meta"))


def test_a_cpu_without_bfloat16_packs_nothing(monkeypatch):
    monkeypatch.setattr(linear, "_cpu_multiplies_bfloat16", lambda: False)
    (whole,) = portions(matrix(4, 4, torch.bfloat16), None, "rows", 2).whole
    assert isinstance(whole, DenseLinear)


def test_columns_have_no_bias():
    with pytest.raises(ValueError, match="once per part"):
        portions(matrix(4, 4, torch.float32), torch.zeros(4), "columns", 2)


@packable
def test_in_place_nothing_is_copied():
    weight = matrix(8, 4, torch.bfloat16)
    for part in portions(weight, None, "rows", 2, in_place=True).parts:
        assert isinstance(part, DenseLinear)
        assert part.weight.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
