"""A matrix, its parts and its fused products, plain and compiled."""

from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from rank_server.compiled import avx512, team
from rank_server.models.compiled_linear import FEW_ROWS, CompiledGated, CompiledLinear, Programs
from rank_server.models.linear import DenseGated, DenseLinear, gated, linear, parts_of, portions

BF16 = torch.bfloat16
PAIRS = avx512.available()
KINDS = ["pairs", "fp32", "alone"] if PAIRS else ["fp32", "alone"]
"""Programs for processors that multiply bf16 numbers, for others, and for one thread."""


@cache
def programs(kind: str, of_gates: bool) -> Programs:
    return Programs.of(of_gates, team=kind != "alone", pairs=PAIRS and kind != "fp32")


def matrix(rows: int, columns: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x·Wᵀ in float64, and the sum of the absolute values of what is added up."""
    return x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T


def near(got: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, roundings: int = 0) -> None:
    """One rounding of the result and fp32 sums of this magnitude; roundings: further ones, of intermediate results."""
    assert got.shape == exact.shape
    last = {torch.float32: 2**-23, BF16: 2**-8}[got.dtype]
    assert ((got.double() - exact).abs() <= last * exact.abs() + (1e-6 + roundings * last) * magnitude + 1e-37).all()


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 11, FEW_ROWS, FEW_ROWS + 1, 101])
@pytest.mark.parametrize(("n", "k"), [(1, 5), (7, 33), (16, 31), (33, 32), (100, 64), (130, 48), (5, 0), (0, 5)])
def test_compiled_products_and_what_is_fused_with_them(kind, rows, n, k):
    weight, gate, bias = matrix(n, k), matrix(n, k, seed=4), matrix(1, n, seed=1)[0]
    x, other = matrix(rows, k, seed=2), matrix(rows, n, seed=3)
    kept = x.clone(), other.clone()
    # Without products of bf16, many rows go torch's way, which rounds what it adds to.
    roundings = 2 if rows > FEW_ROWS and kind == "fp32" else 0
    exact, size = product(x, weight)
    plain, biased = (CompiledLinear.of(weight, each, programs(kind, False)) for each in (None, bias))
    near(plain(x), exact, size)
    near(biased(x), exact + bias.double(), size + bias.double().abs())
    near(plain.plus(x, other), exact + other.double(), size + other.double().abs(), roundings)
    both = bias.double() + other.double()
    near(biased.plus(x, other), exact + both, size + bias.double().abs() + other.double().abs(), roundings)
    gates, size_of_gates = product(x, gate)
    fused = CompiledGated.of(gate, weight, programs(kind, True))(x)
    near(fused, functional.silu(gates) * exact, (1 + size_of_gates) * (1 + size), roundings)
    assert torch.equal(x, kept[0])
    assert torch.equal(other, kept[1])


@torch.inference_mode()
@settings(max_examples=60)
@given(rows=st.integers(1, 2 * FEW_ROWS), n=st.integers(1, 200), k=st.integers(1, 300), skip=st.integers(0, 9), data=st.data())
def test_views_with_offsets_and_strides(rows, n, k, skip, data):
    """Nothing beside the views is read: it is NaN."""
    kind = data.draw(st.sampled_from(KINDS))

    def view(height, width, seed):
        whole = torch.full((height + 2, width + 2 * skip), torch.nan).to(BF16)
        inner = whole[1 : height + 1, skip : skip + width]
        inner.copy_(matrix(height, width, seed=seed))
        return inner

    weight, gate, x, other = view(n, k, 0), view(n, k, 1), view(rows, k, 2), view(rows, n, 3)
    exact, size = product(x, weight)
    roundings = 2 if kind == "fp32" else 0
    matrix_ = CompiledLinear.of(weight, None, programs(kind, False))
    near(matrix_.plus(x, other), exact + other.double(), size + other.double().abs(), roundings)
    gates, size_of_gates = product(x, gate)
    fused = CompiledGated.of(gate, weight, programs(kind, True))(x)
    near(fused, functional.silu(gates) * exact, (1 + size_of_gates) * (1 + size), roundings)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_a_stride_between_their_numbers(kind):
    weight, x, other = matrix(20, 40), matrix(40, 3, seed=1).T, matrix(20, 3, seed=2).T
    exact, size = product(x, weight)
    got = CompiledLinear.of(weight, None, programs(kind, False)).plus(x, other)
    near(got, exact + other.double(), size + other.double().abs())


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 7, FEW_ROWS, 50, 300])
def test_results_are_the_same_with_any_number_of_threads(threads, rows):
    """Also where there are more threads than features or panels."""
    for n in (3, 500):
        weight, gate, x, other = matrix(n, 700), matrix(n, 700, seed=1), matrix(rows, 700, seed=2), matrix(rows, n, seed=3)
        for kind in KINDS:
            if rows > FEW_ROWS and kind == "fp32":
                continue
            alone = "alone" if kind != "fp32" else "fp32"
            torch.set_num_threads(1)
            wanted = CompiledLinear.of(weight, None, programs(alone, False)).plus(x, other)
            wanted_gated = CompiledGated.of(gate, weight, programs(alone, True))(x)
            torch.set_num_threads(threads)
            assert torch.equal(CompiledLinear.of(weight, None, programs(kind, False)).plus(x, other), wanted)
            assert torch.equal(CompiledGated.of(gate, weight, programs(kind, True))(x), wanted_gated)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_do_not_depend_on_each_other(kind):
    weight, gate, x = matrix(70, 700), matrix(70, 700, seed=1), matrix(FEW_ROWS, 700, seed=2)
    plain, fused = CompiledLinear.of(weight, None, programs(kind, False)), CompiledGated.of(gate, weight, programs(kind, True))
    for rows in ([0], [5, 6], [1, 2, 3, 4, 5], [FEW_ROWS - 1]):
        assert torch.equal(plain(x[rows]), plain(x)[rows])
        assert torch.equal(fused(x[rows]), fused(x)[rows])


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [2, FEW_ROWS + 4])
def test_numbers_that_are_none_stay_in_their_row(kind, rows):
    x = matrix(rows, 40, seed=1)
    x[1, 3] = torch.nan
    for got in (
        CompiledLinear.of(matrix(20, 40), None, programs(kind, False))(x),
        CompiledGated.of(matrix(20, 40), matrix(20, 40, seed=2), programs(kind, True))(x),
    ):
        assert got[1].isnan().all()
        assert got[[i for i in range(rows) if i != 1]].isfinite().all()


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_gates_far_from_zero(kind):
    """silu is the identity or 0 there, and exp of it would leave the range."""
    weight, x = torch.ones(16, 2, dtype=BF16), torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=BF16)
    gate = torch.tensor([[300.0, -300.0]] * 16, dtype=BF16)
    high, low = CompiledGated.of(gate, weight, programs(kind, True))(x)
    assert (high == 300).all()
    assert (low.abs() < 1e-30).all()


@pytest.mark.parametrize("wrong", [matrix(1, 7), matrix(1, 8, torch.float32)])
def test_rows_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError, match="matrix of 4 × 8"):
        linear(matrix(4, 8))(wrong)


@pytest.mark.parametrize("wrong", [matrix(2, 4), matrix(1, 4, torch.float32)])
def test_what_is_added_or_gates_must_fit(wrong):
    weight = matrix(5, 4)
    with pytest.raises(ValueError, match=r"instead of bfloat16 ones in \[5\]"):
        linear(weight, wrong[0])
    with pytest.raises(ValueError, match=r"instead of bfloat16 ones in \[5, 4\]"):
        CompiledGated.of(wrong, weight, programs("alone", True))
    with pytest.raises(ValueError, match=r"instead of bfloat16 ones in \[1, 5\]"):
        linear(weight).plus(matrix(1, 4), wrong)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("biased", [False, True])
def test_plain_products(dtype, biased):
    weight, gate, bias = matrix(33, 20, dtype), matrix(33, 20, dtype, 1), matrix(1, 33, dtype, 2)[0] if biased else None
    x, other = matrix(4, 20, dtype, 3), matrix(4, 33, dtype, 4)
    (exact, size), (gates, _) = product(x, weight), product(x, gate)
    exact = exact if bias is None else exact + bias.double()
    near(DenseLinear(weight, bias)(x), exact, 1 + size)
    near(DenseLinear(weight, bias).plus(x, other), exact + other.double(), 2 + size, 1)
    near(DenseGated(gate, weight)(x), functional.silu(gates) * product(x, weight)[0], (1 + gates.abs()) * (1 + size), 2)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_parts_together_are_the_whole(dtype, parts, axis):
    """Seven rows or columns over eight parts leave one without any."""
    n, k = (7, 33) if axis == "rows" else (33, 7)
    weight, bias = matrix(n, k, dtype), matrix(1, n, dtype, 1)[0] if axis == "rows" else None
    x = matrix(4, k, dtype, 2)
    cut = portions(weight, bias, axis, parts)
    assert len(cut.parts) == parts
    exact, size = product(x, weight)
    exact = exact if bias is None else exact + bias.double()
    near(cut.whole(x), exact, 1 + size)
    if axis == "rows":
        near(torch.cat([part(x) for part in cut.parts], 1), exact, 1 + size)
    else:
        columns = [x[:, first:last] for first, last in pairwise(i * k // parts for i in range(parts + 1))]
        terms = [part(mine).double() for part, mine in zip(cut.parts, columns, strict=True)]
        near(sum(terms).to(dtype), exact, 1 + size, 1)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_parts_are_views(dtype):
    weight, bias = matrix(7, 12, dtype), matrix(1, 7, dtype)[0]
    for cut in (portions(weight, bias, "rows", 3), portions(weight, None, "columns", 5)):
        assert cut.whole.weight is weight
        for part in cut.parts:
            assert part.weight.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert [len(part) for part in parts_of(bias, "rows", 3)] == [2, 2, 3]


def test_what_is_compiled():
    assert isinstance(linear(matrix(2, 2)), CompiledLinear)
    assert isinstance(gated(matrix(2, 2), matrix(2, 2)), CompiledGated)
    for other in (matrix(2, 2, torch.float32), matrix(2, 2, torch.float16), matrix(2, 3).T, matrix(2, 2).to("meta")):
        assert isinstance(linear(other), DenseLinear)
        assert isinstance(gated(other, other), DenseGated)


def test_a_team_needs_a_runtime(monkeypatch):
    monkeypatch.setattr(team, "parallel", lambda: None)
    with pytest.raises(ValueError, match="OpenMP"):
        Programs.of(False, team=True, pairs=False)


def test_columns_have_no_bias():
    with pytest.raises(ValueError, match="once per part"):
        portions(matrix(4, 4, torch.float32), torch.zeros(4), "columns", 2)
