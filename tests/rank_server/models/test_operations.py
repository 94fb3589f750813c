"""What a decoder does between its matrices, by torch and compiled, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rank_server.collectives.exchange import sum_in_member_order
from rank_server.compiled import sums
from rank_server.compiled.row_call import FEW_ROWS
from rank_server.models import row_programs
from rank_server.models.compiled_operations import CompiledOperations
from rank_server.models.operations import TorchOperations, operations_for
from rank_server.models.rotary import rotate
from tests.devices import CPU

BF16 = torch.bfloat16
EPS = 1e-5
WAYS = [(TorchOperations(), torch.float32), (TorchOperations(), BF16), (CompiledOperations(), BF16)]
COUNTS = [0, 1, 2, 8, FEW_ROWS, FEW_ROWS + 1, 301]


def seeded(*shape, dtype=BF16, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def normed(x, weight, eps=EPS):
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def angles(tokens, head_dim, dtype, seed=5):
    """Cosines and signed sines as `Rotary.at` gives them."""
    turns = torch.rand(tokens, 1, head_dim // 2, generator=torch.Generator().manual_seed(seed)) * 7
    cos, sin = turns.cos(), turns.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def near(got, exact, roundings):
    """Within so many roundings to the dtype of `got`, each of the size of the largest number of the row."""
    one = {torch.float32: 2**-22, BF16: 2**-8}[got.dtype]
    bound = one * roundings * exact.abs().amax(-1, keepdim=True)
    assert got.shape == exact.shape
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.fixture
def compiled_only(monkeypatch):
    """torch's way must not be taken."""
    for name in ("rms_norm", "turn"):
        monkeypatch.setattr(TorchOperations, name, lambda *args: pytest.fail("torch's way was taken"))


@pytest.mark.parametrize("tokens", COUNTS)
@pytest.mark.parametrize("width", [16, 48, 576, 24, 7])
@pytest.mark.parametrize(("operations", "dtype"), WAYS)
def test_norms(operations, dtype, width, tokens):
    x, weight = seeded(tokens, width, dtype=dtype, scale=3), seeded(width, dtype=dtype, seed=1)
    kept = x.clone()
    near(operations.rms_norm(x, weight, EPS), normed(x, weight), 1.01 if isinstance(operations, CompiledOperations) else 2)
    assert torch.equal(x, kept)


def test_the_compiled_norm_rounds_once(compiled_only):
    x, weight = seeded(64, 576, scale=3), seeded(576, seed=1)
    got, exact = CompiledOperations().rms_norm(x, weight, EPS).double(), normed(x, weight)
    assert ((got - exact).abs() <= exact.abs() * (2**-8 + 1e-6)).all()


@pytest.mark.parametrize("scale", [1e-4, 1e-20, 1e15])
def test_norms_of_small_and_large_numbers(scale, compiled_only):
    x, weight = seeded(3, 64, scale=scale), seeded(64, seed=1)
    near(CompiledOperations().rms_norm(x, weight, EPS), normed(x, weight), 1.01)


def test_norms_of_rows_apart(compiled_only):
    wide, weight = seeded(40, 96), seeded(64, seed=1)
    x = wide[:, 16:80]
    assert torch.equal(
        CompiledOperations().rms_norm(x, weight, EPS), CompiledOperations().rms_norm(x.contiguous(), weight, EPS)
    )


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(poison, compiled_only):
    x, weight = seeded(5, 64), seeded(64, seed=1)
    wanted = CompiledOperations().rms_norm(x, weight, EPS)
    x[2, 17] = poison
    got = CompiledOperations().rms_norm(x, weight, EPS)
    assert got[2, 17].isnan()
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], wanted[others])


def turned(operations, tokens, num_q, num_kv, head_dim, dtype, with_norms, eps=EPS):
    """(q, k, v) and what they should be, in float64."""
    heads = seeded(tokens, num_q + 2 * num_kv, head_dim, dtype=dtype, scale=2)
    cos, sin = angles(tokens, head_dim, dtype)
    norms = (seeded(head_dim, dtype=dtype, seed=1), seeded(head_dim, dtype=dtype, seed=2)) if with_norms else None
    q, k, v = heads.double().split((num_q, num_kv, num_kv), 1)
    if norms is not None:
        q, k = normed(q, norms[0], eps), normed(k, norms[1], eps)
    wanted = rotate(q, cos.double(), sin.double()), rotate(k, cos.double(), sin.double()), v
    return operations.turn(heads, num_q, cos, sin, norms, eps), wanted


@pytest.mark.parametrize("tokens", COUNTS)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 16, 80, 10])
@pytest.mark.parametrize(("operations", "dtype"), WAYS)
def test_heads_are_turned(operations, dtype, head_dim, with_norms, tokens):
    (q, k, v), wanted = turned(operations, tokens, 9, 3, head_dim, dtype, with_norms)
    for got, exact in zip((q, k), wanted, strict=False):
        near(got, exact, 1.01 if isinstance(operations, CompiledOperations) and head_dim % 32 == 0 else 4)
    assert torch.equal(v.double(), wanted[2])


@given(
    tokens=st.integers(0, 70),
    num_q=st.integers(1, 9),
    num_kv=st.integers(1, 4),
    half=st.integers(1, 8),
    with_norms=st.booleans(),
    eps=st.sampled_from([1e-5, 1e-6]),
)
@settings(max_examples=100)
def test_any_number_of_heads(tokens, num_q, num_kv, half, with_norms, eps):
    (q, k, v), wanted = turned(CompiledOperations(), tokens, num_q, num_kv, 32 * half, BF16, with_norms, eps)
    near(q, wanted[0], 1.01)
    near(k, wanted[1], 1.01)
    assert torch.equal(v.double(), wanted[2])


def test_results_depend_neither_on_threads_nor_on_other_rows(threads, compiled_only):
    operations, tokens = CompiledOperations(), 3 * FEW_ROWS + 1
    x, weight = seeded(tokens, 64), seeded(64, seed=1)
    together = operations.rms_norm(x, weight, EPS)
    assert torch.equal(together, torch.cat([operations.rms_norm(row[None], weight, EPS) for row in x]))
    heads, (cos, sin) = seeded(tokens, 5, 64), angles(tokens, 64, BF16)
    norms = weight, weight
    alone = [operations.turn(heads[i : i + 1].clone(), 3, cos[i : i + 1], sin[i : i + 1], norms, EPS) for i in range(tokens)]
    for index, got in enumerate(operations.turn(heads, 3, cos, sin, norms, EPS)):
        assert torch.equal(got, torch.cat([row[index] for row in alone]))


def test_heads_in_pieces_take_torchs_way():
    heads, (cos, sin) = seeded(4, 6, 64)[:, :5], angles(4, 64, BF16)
    kept = heads.clone()
    for got, want in zip(
        CompiledOperations().turn(heads, 3, cos, sin, None, EPS),
        TorchOperations().turn(kept, 3, cos, sin, None, EPS),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_warming_up_compiles_what_a_step_will_need():
    operations = operations_for(CPU, BF16)
    operations.warm_up(3e-5, True)
    programs = row_programs.rms_norm, row_programs.turn_heads, sums.program
    before = [each.cache_info().misses for each in programs]
    turned(operations, 2, 3, 1, 64, BF16, with_norms=True, eps=3e-5)
    operations.rms_norm(seeded(2, 64), seeded(64), 3e-5)
    assert sum_in_member_order(seeded(2, 1, 64)).shape == (1, 64)
    assert [each.cache_info().misses for each in programs] == before


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(BF16, CompiledOperations), (torch.float32, TorchOperations), (torch.float16, TorchOperations)],
)
def test_which_way_is_taken(dtype, kind):
    assert type(operations_for(CPU, dtype)) is kind
    assert type(operations_for(torch.device("cuda"), dtype)) is TorchOperations
