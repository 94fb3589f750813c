"""Compiled prefill in bf16: how exact it is, scores of any size, and what is not finite."""

import math

import pytest
import torch
from torch.nn import functional

from rank_server.attention.cpu_prefill import CpuPrefill
from rank_server.attention.partial import dense_partial
from rank_server.attention.prefill_tile import TILE
from tests.rank_server.attention.dense import dense_attention
from tests.rank_server.attention.paged_cases import SCALE
from tests.rank_server.attention.prefill_cases import BF16, WEIGHT, attended, case_of, needs_the_instructions, table, tensors

pytestmark = needs_the_instructions


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("magnitude", [0.0, 0.3, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("seed", range(3))
def test_errors_are_not_above_those_of_torch_in_bf16(head_dim, magnitude, seed):
    q, k, v = tensors(40, 700, key_dim=head_dim, value_dim=head_dim, seed=seed, magnitude=magnitude)
    scale, seen = head_dim**-0.5, torch.arange(661, 701)
    out, _ = CpuPrefill().attend_dense(q, k, v, scale, seen)
    wanted, _ = dense_attention(q, k, v, seen, scale)
    mask = torch.zeros(len(q), len(k), dtype=BF16).masked_fill_(torch.arange(len(k)) >= seen[:, None], -math.inf)
    heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    other = functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=scale, enable_gqa=True)
    ours, theirs = (x.to(BF16).double() - wanted for x in (out, other[0].transpose(0, 1)))
    assert ours.square().mean().sqrt() <= 1.05 * theirs.square().mean().sqrt()


def test_the_logarithm_of_the_sum_is_as_exact_as_its_terms():
    """Weights of equal scores are ones, those of scores far apart one: nothing is rounded."""
    q, k, v = tensors(40, 333)
    seen = torch.arange(294, 334)
    for keys in (k[:1].expand_as(k), torch.cat((k[:1] * 0 + 2 * q[0, :1].sign(), k[1:] * 0 - 40 * q[0, :1].sign()))):
        queries = q[:1].expand_as(q).contiguous()[:, :1].abs() * q[0, :1].sign()
        queries = queries.expand(40, 6, 64)
        _, lse = CpuPrefill().attend_dense(queries, keys.contiguous(), v, 0.125, seen)
        _, wanted = dense_attention(queries, keys, v, seen, 0.125)
        torch.testing.assert_close(lse.double(), wanted, rtol=3e-7, atol=1e-6)


def test_b10_scores_far_apart_stay_finite():
    case = case_of((list(range(690, 701)), table(700, 4)), head_dim=64, magnitude=300.0)
    out, lse = attended(case)
    wanted, wanted_lse = dense_attention(case.q, *case.keys[0], case.batch.visible, SCALE)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=WEIGHT)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=1.0)


@pytest.mark.parametrize("step", [2.0**exponent for exponent in (-7, 20, 24, 31, 40, 90)])
@pytest.mark.parametrize("order", ["ascending", "descending", "mixed"])
def test_scores_of_any_size_are_softened_as_they_are_elsewhere(step, order):
    """Scores are multiples of step, so exact: from some size on the highest one's key has all of the weight."""
    q, k, v = tensors(40, 101)
    numbers = torch.arange(-50, 51)
    if order != "ascending":
        numbers = numbers.flip(0) if order == "descending" else numbers[torch.randperm(101, generator=torch.Generator())]
    q[:], k[:] = 0, 0
    q[..., 0] = step
    k[..., 0] = numbers[:, None]
    seen = torch.arange(62, 102)
    out, lse = CpuPrefill().attend_dense(q, k, v, 0.3, seen)
    wanted, wanted_lse = dense_partial(q.float(), k.float(), v.float(), 0.3, seen)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=1.01 * WEIGHT)
    torch.testing.assert_close(out, wanted, rtol=0, atol=float(2 * WEIGHT * v.abs().max()))


@pytest.mark.parametrize("key", [0, TILE - 1, 200])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_in_a_value_is_seen(key, poison):
    case = case_of(([201] * 9, table(201, 4)), ([9] * 9, [60, 61, 62]), head_dim=16)
    cache = case.pool.cache(0)[1].view(-1, 2, 16)
    cache[int(case.batch.rows[0].block_table[key // 4]) * 4 + key % 4] = poison
    out, _ = attended(case)
    assert not out[:9].isfinite().any() and out[9:].isfinite().all()


@pytest.mark.parametrize("key", [0, TILE - 1, 200])
def test_nan_keys_are_seen_by_those_who_see_them(key):
    case = case_of(([key] * 5 + [201] * 9, table(201, 4)), ([9] * 9, [60, 61, 62]), head_dim=16)
    cache = case.pool.cache(0)[0].view(-1, 2, 16)
    cache[int(case.batch.rows[0].block_table[key // 4]) * 4 + key % 4] = torch.nan
    out, lse = attended(case)
    assert out[5:14].isnan().all() and lse[5:14].isnan().all()
    assert out[:5].isfinite().all() and out[14:].isfinite().all()


def test_nan_queries_are_seen():
    case = case_of(([201] * 9, table(201, 4)), head_dim=16)
    case.q[2, 1, 3] = torch.nan
    out, lse = attended(case)
    assert out[2, 1].isnan().all() and lse[2, 1].isnan()
    assert int(out.isnan().sum()) == 16 and int(lse.isnan().sum()) == 1


def test_infinite_scores_end():
    q, k, v = tensors(40, 90)
    k[17, 0] = math.inf
    out, lse = CpuPrefill().attend_dense(q, k, v, 0.125, None)
    assert not (out[:, :3].isfinite().all(-1) & lse[:, :3].isfinite()).any()
    assert out[:, 3:].isfinite().all()
