"""Rows with few queries on a CPU, by the compiled program, against dense attention in float64."""

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from rank_server.attention import cpu_decode, merge_program
from rank_server.attention.batch import AttentionBatch
from rank_server.attention.cpu import CpuKernels
from rank_server.attention.cpu_decode import FEW_QUERIES, FEWEST_KEYS, MOST_RANGES, CpuDecode, Queries, fits, suits
from rank_server.attention.decode_program import TILE
from rank_server.attention.merge import merge_partials
from rank_server.attention.partial import paged_partial
from rank_server.compiled.openmp import parallel
from tests.rank_server.attention.dense import dense_attention
from tests.rank_server.attention.paged_cases import CONSECUTIVE, SCALE, SCATTERED, Case, make

BF16 = torch.bfloat16


def attended(case, use_threads=None, scale=SCALE):
    """Output and lse, which held NaN before, of all rows of a case."""
    out, lse = torch.full(case.q.shape, torch.nan), torch.full(case.q.shape[:2], torch.nan)
    caches = case.pool.cache(0)
    assert suits(case.q, *caches)
    CpuDecode(use_threads).attend(case.q, *caches, case.batch.rows, case.batch, scale, out, lse)
    return out, lse


def check(case: Case, use_threads=None, atol=2e-6):
    case.expect(*attended(case, use_threads), atol)


def long_table(keys, block_size, first=0):
    """Blocks of so many keys in no order."""
    columns = -(-keys // block_size)
    return [first + (7 * i + 3) % columns for i in range(columns)] if columns % 7 else [first + i for i in range(columns)]


@pytest.mark.parametrize("use_threads", [True, False])
@pytest.mark.parametrize("table", [CONSECUTIVE, SCATTERED], ids=["consecutive blocks", "scattered blocks"])
@pytest.mark.parametrize("seen", [[1], [3], [4], [5], [13], [16], [13, 14, 15, 16], [0, 1, 1, 2], [0, 0], [3, 3, 3]])
def test_b6_b7_every_query_sees_its_own_keys_and_nothing_stale(seen, table, use_threads):
    check(make((seen, table), dtype=BF16, head_dim=16), use_threads)


def test_rows_of_compiled_decode_do_not_pay_for_runs_of_blocks():
    case = make(([13], SCATTERED), ([5], CONSECUTIVE), dtype=BF16, head_dim=16)
    CpuKernels().paged(case.q, *case.pool.cache(0), case.batch, SCALE)
    assert not any("runs" in vars(row) for row in case.batch.rows)


@pytest.mark.parametrize("keys", [TILE - 1, TILE, TILE + 1, FEWEST_KEYS - 1, FEWEST_KEYS, FEWEST_KEYS + 1, 1000, 4321, 8200])
@pytest.mark.parametrize("block_size", [1, 16, 48, 128])
def test_long_rows(keys, block_size, threads):
    check(make(([keys], long_table(keys, block_size)), dtype=BF16, head_dim=16, block_size=block_size))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 32), (8, 2, 128), (12, 1, 48), (32, 1, 16), (7, 7, 256), (20, 2, 80)]
)
def test_query_heads_share_kv_heads_in_order(heads, kv_heads, head_dim):
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": BF16}
    check(make(([7], SCATTERED), ([0], []), ([2, 3, 4], [11, 12]), ([200], long_table(200, 4, 13)), **sizes), atol=4e-6)


def test_b1_rows_without_keys_are_exactly_empty_between_others():
    check(make(([0], []), ([9], SCATTERED), ([0], [11]), ([0, 0, 1], [12]), ([2], [13]), dtype=BF16, head_dim=16))
    check(make(([0], []), ([0], [3]), dtype=BF16, head_dim=16))


def test_results_depend_neither_on_threads_nor_on_other_rows(threads):
    rows = [([n], long_table(n, 16, first)) for n, first in ((5000, 0), (130, 320), (1, 330), (900, 340))]
    sizes = {"dtype": BF16, "head_dim": 64, "heads": 9, "kv_heads": 3, "block_size": 16}
    case = make(*rows, **sizes)
    out, lse = attended(case, use_threads=False)
    together = attended(case)
    assert torch.equal(out, together[0]) and torch.equal(lse, together[1])
    for row in case.batch.rows:
        alone = replace(case, batch=replace(case.batch, rows=(row,)))
        alone_out, alone_lse = attended(alone)
        at = row.q_start
        assert torch.equal(out[at], alone_out[at]) and torch.equal(lse[at], alone_lse[at])
        others = [i for i in range(len(rows)) if i != at]
        assert alone_out[others].isnan().all() and alone_lse[others].isnan().all()


def test_low_precision_queries_are_widened():
    case = make(([40], long_table(40, 4)), dtype=BF16, head_dim=32)
    rounded = replace(case, q=case.q.to(BF16))
    exact = replace(case, q=rounded.q.float())
    assert torch.equal(attended(rounded)[0], attended(exact)[0])


def test_queries_that_are_not_contiguous():
    case = make(([40], long_table(40, 4)), ([3], [11]), dtype=BF16, head_dim=32)
    spread = torch.zeros(2, 7, 32)
    spread[:, 1:5] = case.q
    assert torch.equal(attended(replace(case, q=spread[:, 1:5]))[0], attended(case)[0])


def test_b10_scores_far_apart_stay_finite():
    case = make(([700], long_table(700, 4)), dtype=BF16, head_dim=64, magnitude=300.0)
    out, lse = attended(case)
    wanted, wanted_lse = dense_attention(case.q, *case.keys[0], case.batch.visible, SCALE)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-3, atol=0.3)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", [0, 63, 200])
def test_what_is_not_finite_is_seen(poison, key):
    """An infinite key gives NaN or not by the sign of the query; in a value it can't be missed."""
    case = make(([201], long_table(201, 4)), ([9], [60, 61, 62]), dtype=BF16, head_dim=16)
    cache = case.pool.cache(0)[1].view(-1, 2, 16)
    cache[int(case.batch.rows[0].block_table[key // 4]) * 4 + key % 4] = poison
    out, _ = attended(case)
    assert not out[0].isfinite().any() and out[1].isfinite().all()


@pytest.mark.parametrize("key", [0, 63, 200])
def test_nan_keys_are_seen(key):
    case = make(([201], long_table(201, 4)), ([9], [60, 61, 62]), dtype=BF16, head_dim=16)
    cache = case.pool.cache(0)[0].view(-1, 2, 16)
    cache[int(case.batch.rows[0].block_table[key // 4]) * 4 + key % 4] = torch.nan
    out, lse = attended(case)
    assert out[0].isnan().all() and lse[0].isnan().all() and out[1].isfinite().all()


def test_nan_queries_are_seen():
    case = make(([201], long_table(201, 4)), ([9], [60, 61, 62]), dtype=BF16, head_dim=16)
    case.q[0, 1, 3] = torch.nan
    out, lse = attended(case)
    assert out[0, 1].isnan().all() and lse[0, 1].isnan()
    assert out[0, [0, 2, 3]].isfinite().all() and out[1].isfinite().all()


def test_layers_of_a_step_share_what_is_prepared_and_steps_do_not():
    case = make(([130], long_table(130, 4)), dtype=BF16, head_dim=16)
    other = make(([3], [40]), dtype=BF16, head_dim=16)
    decode = CpuDecode()
    for each in (case, case, other, case):
        out, lse = torch.empty(each.q.shape), torch.empty(each.q.shape[:2])
        decode.attend(each.q, *each.pool.cache(0), each.batch.rows, each.batch, SCALE, out, lse)
        assert torch.equal(out, attended(each)[0])


def test_caches_of_other_heads_are_prepared_for_anew():
    """The same step and query heads over fewer KV heads, and over wider ones."""
    table, decode = long_table(130, 4), CpuDecode()
    cases = [make(([130], table), dtype=BF16, head_dim=dim, kv_heads=heads) for dim, heads in ((16, 4), (16, 1), (64, 1))]
    for each in cases:
        out, lse = torch.empty(each.q.shape), torch.empty(each.q.shape[:2])
        decode.attend(each.q, *each.pool.cache(0), cases[0].batch.rows, cases[0].batch, SCALE, out, lse)
        assert torch.equal(out, attended(each)[0])


def test_calls_from_many_threads():
    """As of ranks that are threads of one process."""
    case = make(([3000], long_table(3000, 16)), dtype=BF16, head_dim=64, block_size=16)
    wanted = attended(case)
    found = [None] * 4

    def call(index):
        found[index] = [attended(case) for _ in range(20)]

    callers = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    for out, lse in (pair for pairs in found for pair in pairs):
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])


@pytest.mark.parametrize("keys", [0, 1, TILE, TILE + 1, FEWEST_KEYS, FEWEST_KEYS + 1, 5000, 100_000])
def test_ranges_cover_the_keys_once(keys):
    queries = Queries.of(make(([0], []), ([keys], list(range(-(-keys // 4)))), head_dim=1).batch.rows, torch.tensor([0, keys]))
    assert queries.first_range[0] == queries.first_range[1] == 0
    assert queries.first_range[2] == len(queries.ranges) <= MOST_RANGES
    assert queries.num_keys == keys
    firsts, lasts = queries.ranges[:, 1], queries.ranges[:, 2]
    assert [0, *lasts.tolist()] == [*firsts.tolist(), keys]
    assert (firsts < lasts).all() and (firsts % TILE == 0).all()
    assert np.array_equal(queries.ranges[:, 3], lasts - (lasts - firsts) // 2)


# -- who is attended how


def test_a_mixed_step_is_put_together():
    seen = list(range(50, 50 + FEW_QUERIES + 1))
    case = make(([9], SCATTERED), (seen, list(range(20, 40))), ([130], long_table(130, 4, 40)), dtype=BF16, head_dim=16)
    out, lse = CpuKernels().paged(case.q, *case.pool.cache(0), case.batch, SCALE)
    wanted, wanted_lse = paged_partial(case.q, *case.pool.cache(0), case.batch, SCALE)
    torch.testing.assert_close(out, wanted, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=2e-6)


def test_tokens_outside_all_rows_stay_empty():
    case = make(([2], [0]), dtype=BF16, head_dim=16)
    out, lse = CpuKernels().paged(torch.cat([case.q, case.q]), *case.pool.cache(0), case.batch, SCALE)
    assert not out[1].any() and (lse[1] == -math.inf).all()
    assert out[0].any()


@pytest.mark.parametrize(
    ("dtype", "share", "head_dim", "fitting"),
    [
        (BF16, 3, 64, True),
        (BF16, 32, 256, True),
        (BF16, 33, 64, False),
        (BF16, 1, 272, False),
        (BF16, 1, 24, False),
        (torch.float32, 3, 64, False),
        (torch.float16, 3, 64, False),
    ],
)
def test_what_fits(dtype, share, head_dim, fitting):
    assert fits(dtype, share, head_dim) is fitting


def test_caches_that_are_not_contiguous_take_another_way(monkeypatch):
    case = make(([9], SCATTERED), dtype=BF16, head_dim=16)
    wanted, _ = attended(case)
    spread = [torch.cat((cache, cache), 2)[:, :, :2] for cache in case.pool.cache(0)]
    assert not suits(case.q, *spread)
    monkeypatch.setattr(CpuDecode, "attend", lambda *args: pytest.fail("the program was called"))
    out, _ = CpuKernels().paged(case.q, *spread, case.batch, SCALE)
    torch.testing.assert_close(out, wanted, rtol=0, atol=2e-6)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="4 query heads can't share 3 KV heads"):
        case = make(([1], [0]), heads=4, kv_heads=3, dtype=BF16, head_dim=16)
        CpuKernels().paged(case.q, *case.pool.cache(0), case.batch, SCALE)


def test_warming_up_compiles_what_a_step_will_need(monkeypatch):
    CpuKernels().warm_up(BF16, 2, 16, 16)
    CpuKernels().warm_up(torch.float32, 2, 24, 24)
    programs = cpu_decode.program, merge_program.program
    before = [each.cache_info().misses for each in programs]
    case = make(([9], SCATTERED), dtype=BF16, head_dim=16)
    partial = CpuKernels().paged(case.q.to(BF16), *case.pool.cache(0), case.batch, SCALE)
    merge_partials(*(torch.stack((each, each)) for each in partial))
    assert [each.cache_info().misses for each in programs] == before


def test_torch_has_brought_the_threads():
    """Else a rank would quietly compute on one."""
    assert parallel() is not None


def test_an_empty_batch():
    case = make(([2], [0]), dtype=BF16, head_dim=16)
    nothing = AttentionBatch((), case.batch.slots[:0], case.batch.visible[:0])
    out, lse = CpuKernels().paged(case.q[:0], *case.pool.cache(0), nothing, SCALE)
    assert len(out) == len(lse) == 0
