import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rank_server.attention import partial
from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.attention.partial import dense_partial, paged_partial
from rank_server.attention.shifted_softmax import ShiftedSoftmax, suits
from rank_server.kv_pool import KvPool
from tests.rank_server.attention.dense import dense_attention

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(not suits(torch.zeros(1, dtype=BF16), BF16), reason="this CPU multiplies no bf16 matrices")


def tensors(
    tokens: int, num_keys: int, head_dim: int = 64, magnitude: float = 1.0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, 6, head_dim), (num_keys, 2, head_dim), (num_keys, 2, head_dim)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return (q * magnitude).to(BF16), k.to(BF16), v.to(BF16)


def sdpa(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    mask = torch.zeros(len(q), len(k), dtype=BF16).masked_fill_(torch.arange(len(k)) >= seen[:, None], -math.inf)
    heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    out = functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def no_flash(*args: object) -> object:
    raise AssertionError("the flash operation was needed")


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("magnitude", [0.0, 0.3, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("seed", range(3))
def test_errors_are_at_most_twice_those_of_torch_in_bf16(
    head_dim: int, magnitude: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "_flash", no_flash)
    scale = head_dim**-0.5
    q, k, v = tensors(40, 700, head_dim, magnitude, seed)
    seen = torch.arange(661, 701)
    out, lse = dense_partial(q, k, v, scale, seen)
    wanted, wanted_lse = dense_attention(q, k, v, seen, scale)
    ours, theirs = (x.to(BF16).double() - wanted for x in (out, sdpa(q, k, v, seen, scale)))
    assert ours.square().mean().sqrt() <= 1.7 * theirs.square().mean().sqrt()
    # The largest of 15000 errors is a matter of luck in both.
    assert ours.abs().max() <= 3 * theirs.abs().max()
    # Every weight is rounded to 8 bits, so their sum is at most 2^-8 off, to nearest 2^-9.
    assert (lse.double() - wanted_lse).abs().max() <= 2.0**-8


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    "seen", [[0] * 20 + list(range(1, 301)), [400] * 50, list(range(200, 520)), [i // 2 for i in range(600)]]
)
def test_b6_b7_paged_queries_see_their_own_keys_and_nothing_stale(seen: list[int], scattered: bool) -> None:
    q, k, v = tensors(len(seen), seen[-1])
    blocks = -(-seen[-1] // 16)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)) if scattered else torch.arange(blocks)
    pool = KvPool(1, blocks + 1, 16, 2, 64, BF16, "cpu")
    pool.fill_nan(range(blocks + 1))
    positions = torch.arange(seen[-1])
    pool.write(0, k, v, table[positions // 16] * 16 + positions % 16)
    visible = torch.tensor(seen)
    row = AttentionRow(0, len(seen), table, seen[-1], seen[0])
    out, lse = paged_partial(q, *pool.cache(0), AttentionBatch((row,), torch.full_like(visible, -1), visible), 0.125)
    wanted, wanted_lse = dense_attention(q, k, v, visible, 0.125)
    # A query that sees one key shows the rounding of nothing but the value; with few keys errors are those of the weights.
    torch.testing.assert_close(out.double(), wanted, rtol=2.0**-7, atol=2.0**-7)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=2.0**-8)
    assert (out[visible == 0] == 0).all()
    assert (lse[visible == 0] == -math.inf).all()


def test_scores_far_above_the_sample_are_found_and_computed_in_another_way() -> None:
    q, k, v = tensors(40, 900)
    k[500] = q[3, 0] * 8
    seen = torch.full((40,), 900)
    softmax = ShiftedSoftmax(q, k[:8], 0.125)
    softmax.add(k, v)
    assert softmax.result(None) is None
    out, lse = dense_partial(q, k, v, 0.125)
    wanted, wanted_lse = dense_attention(q, k, v, seen, 0.125)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=2e-6)


def test_a_sample_far_above_what_a_query_sees_is_noticed() -> None:
    q, k, v = tensors(40, 900)
    k[899] = q[3, 0] * 8
    seen = torch.full((40,), 899)
    softmax = ShiftedSoftmax(q, k[892:], 0.125)
    softmax.add(k, v, seen)
    assert softmax.result(None) is None


def test_nan_stays_nan() -> None:
    q, k, v = tensors(40, 900)
    k[500, 0, 3] = math.nan
    out, lse = dense_partial(q, k, v, 0.125)
    assert out[:, :3].isnan().all() and lse[:, :3].isnan().all()
    assert out[:, 3:].isfinite().all()


def test_pieces_may_come_in_any_size() -> None:
    q, k, v = tensors(40, 300)
    seen = torch.arange(260, 300)
    results = []
    for size in (300, 17):
        softmax = ShiftedSoftmax(q, k[:16], 0.125)
        for first in range(0, 300, size):
            piece = slice(first, first + size)
            softmax.add(k[piece], v[piece], seen - first)
        results.append(softmax.result(None))
    (out, lse), (other_out, other_lse) = (each for each in results if each is not None)
    torch.testing.assert_close(out, other_out, rtol=2.0**-7, atol=2.0**-8)
    torch.testing.assert_close(lse, other_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("q_dtype", "stored"), [(torch.float32, BF16), (BF16, torch.float32), (torch.float16, torch.float16)])
def test_other_dtypes_are_not_suited(q_dtype: torch.dtype, stored: torch.dtype) -> None:
    assert not suits(torch.zeros(1, dtype=q_dtype), stored)
