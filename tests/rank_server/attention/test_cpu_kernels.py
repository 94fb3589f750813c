"""Which rows of a step a CPU attends by which program, and which it can."""

import math

import pytest
import torch

from rank_server.attention import cpu_prefill
from rank_server.attention.cpu import CpuKernels
from rank_server.attention.cpu_decode import FEW_QUERIES
from rank_server.attention.cpu_prefill import CpuPrefill, fits, suits
from rank_server.attention.partial import dense_partial, paged_partial
from rank_server.compiled import avx512
from tests.rank_server.attention.paged_cases import SCALE, SCATTERED
from tests.rank_server.attention.prefill_cases import BF16, WEIGHT, case_of, needs_the_instructions, table, tensors

pytestmark = needs_the_instructions


def test_a_mixed_step_is_put_together():
    seen = list(range(50, 50 + FEW_QUERIES + 1))
    case = case_of(([9], SCATTERED), (seen, list(range(20, 40))), ([130], table(130, 4, 40)), head_dim=16)
    out, lse = CpuKernels().paged(case.q, *case.pool.cache(0), case.batch, SCALE)
    wanted, wanted_lse = paged_partial(case.q, *case.pool.cache(0), case.batch, SCALE)
    few = [0, len(out) - 1]
    torch.testing.assert_close(out[few], wanted[few], rtol=0, atol=2e-6)
    torch.testing.assert_close(out, wanted, rtol=0, atol=6 * WEIGHT)
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=WEIGHT)
    assert not torch.equal(out[1:-1], wanted[1:-1]), "the program was not used"


def test_tokens_outside_all_rows_stay_empty():
    case = case_of(([2] * 6, [0]), head_dim=16)
    out, lse = CpuKernels().paged(torch.cat([case.q, case.q]), *case.pool.cache(0), case.batch, SCALE)
    assert not out[6:].any() and (lse[6:] == -math.inf).all()
    assert out[:6].any()


@pytest.mark.parametrize("use", [True, False])
def test_processors_without_the_instructions_take_another_way(use, monkeypatch):
    monkeypatch.setattr(avx512, "available", lambda: use)
    called = []
    monkeypatch.setattr(CpuPrefill, "_attend", lambda *args: called.append(args))
    case = case_of(([9] * 6, SCATTERED), head_dim=16)
    CpuKernels().paged(case.q, *case.pool.cache(0), case.batch, SCALE)
    q, k, v = tensors(6, 9)
    out, _ = CpuKernels().dense(q, k, v, SCALE)
    assert len(called) == (2 if use else 0)
    if not use:
        assert torch.equal(out, dense_partial(q, k, v, SCALE)[0])


def test_no_keys_at_hand():
    q, k, v = tensors(6, 0)
    out, lse = CpuKernels().dense(q, k, v, SCALE)
    assert not out.any() and (lse == -math.inf).all()
    assert len(CpuKernels().dense(q[:0], *tensors(6, 5)[1:], SCALE)[0]) == 0


@pytest.mark.parametrize(
    ("dtype", "key_dim", "value_dim", "fitting"),
    [
        (BF16, 64, 64, True),
        (BF16, 576, 512, True),
        (BF16, 24, 64, False),
        (BF16, 64, 24, False),
        (BF16, 1040, 64, False),
        (torch.float32, 64, 64, False),
        (torch.float16, 64, 64, False),
    ],
)
def test_what_fits(dtype, key_dim, value_dim, fitting):
    assert fits(dtype, key_dim, value_dim) is fitting


def test_what_suits():
    q, k, v = tensors(6, 32)
    assert suits(q, k, v) and not suits(q.float(), k, v) and not suits(q[:, :5], k, v)
    k_cache, v_cache = (x.view(2, 16, 2, 64) for x in (k, v))
    assert suits(q, k_cache, v_cache)
    gaps = torch.cat((k_cache, k_cache), 1)[:, :16]
    assert not suits(q, gaps, v_cache) and not suits(q, k_cache, gaps)


def test_warming_up_compiles_what_a_step_will_need():
    CpuKernels().warm_up(BF16, 2, 16, 16)
    before = cpu_prefill.program.cache_info().misses
    case = case_of(([9] * 6, SCATTERED), head_dim=16)
    CpuKernels().paged(case.q, *case.pool.cache(0), case.batch, SCALE)
    assert cpu_prefill.program.cache_info().misses == before
