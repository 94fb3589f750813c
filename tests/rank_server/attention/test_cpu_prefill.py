"""Rows with many queries on a CPU, by the compiled program, against dense attention in float64."""

import math
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from rank_server.attention import cpu_prefill
from rank_server.attention.cpu import CpuKernels
from rank_server.attention.cpu_decode import FEW_QUERIES
from rank_server.attention.cpu_prefill import BLOCKS_PER_THREAD, CpuPrefill, Items, fits, suits
from rank_server.attention.partial import dense_partial, paged_partial
from rank_server.attention.prefill_tile import GROUP, GROUPS, TILE
from rank_server.compiled import avx512
from tests.rank_server.attention.dense import dense_attention
from tests.rank_server.attention.test_partial import CONSECUTIVE, SCALE, SCATTERED, make

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(not avx512.available(), reason="this processor multiplies no bf16 numbers in vectors")
WEIGHT = 2.0**-9
"""What rounding to bf16 may change of a weight."""
SHAPES = [(2, 16), (1, 48), (3, 64), (8, 32), (5, 128), (1, 256)]
"""Query heads of a KV head, their width."""


def case_of(*rows, **sizes):
    """As `make`, in bf16, queries too."""
    case = make(*rows, dtype=BF16, **sizes)
    return replace(case, q=case.q.to(BF16))


def table(keys, block_size, first=0):
    """Blocks of so many keys in no order."""
    columns = -(-keys // block_size)
    return [first + block for block in torch.randperm(columns, generator=torch.Generator().manual_seed(columns)).tolist()]


def attended(case, use_threads=None):
    """Output and lse, which held NaN before, of all rows of a case."""
    out, lse = torch.full(case.q.shape, torch.nan), torch.full(case.q.shape[:2], torch.nan)
    caches = case.pool.cache(0)
    assert suits(case.q, *caches)
    CpuPrefill(use_threads).attend_paged(case.q, *caches, case.batch.rows, case.batch, SCALE, out, lse)
    return out, lse


def check_dense(q, k, v, visible, scale, out, lse):
    wanted, wanted_lse = dense_attention(q, k, v, visible, scale)
    largest = v.abs().max().double() if len(v) else 0.0
    # An error of a weight moves the result towards or away from its value.
    assert ((out.double() - wanted).abs() <= 2 * WEIGHT * largest + 1e-5).all()
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=1.01 * WEIGHT)
    assert (out[visible == 0] == 0).all()
    assert (lse[visible == 0] == -math.inf).all()


def check(case, use_threads=None):
    out, lse = attended(case, use_threads)
    for row, (k, v) in zip(case.batch.rows, case.keys, strict=True):
        tokens = slice(row.q_start, row.q_start + row.q_len)
        check_dense(case.q[tokens], k, v, case.batch.visible[tokens], SCALE, out[tokens], lse[tokens])


def tensors(tokens, num_keys, share=3, kv_heads=2, key_dim=64, value_dim=64, seed=0, magnitude=1.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, kv_heads * share, key_dim), (num_keys, kv_heads, key_dim), (num_keys, kv_heads, value_dim)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return (q * magnitude).to(BF16), k.to(BF16), v.to(BF16)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    """torch's number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("use_threads", [True, False])
@pytest.mark.parametrize("blocks", [CONSECUTIVE, SCATTERED], ids=["consecutive blocks", "scattered blocks"])
@pytest.mark.parametrize(
    "seen", [[1], [3], [5], [13, 14, 15, 16], [0, 1, 1, 2], [0, 0], [3] * 9, [0, 3, 6, 9, 12], [9, 0, 16, 2]]
)
def test_b6_b7_every_query_sees_its_own_keys_and_nothing_stale(seen, blocks, use_threads):
    """Whatever is not the row's holds NaN."""
    q_len, most = len(seen), max(seen)
    case = case_of(([*seen, most], blocks), head_dim=16)
    row = replace(case.batch.rows[0], q_len=q_len)
    check(
        replace(case, q=case.q[:q_len], batch=replace(case.batch, rows=(row,), visible=case.batch.visible[:q_len])), use_threads
    )


@settings(max_examples=60)
@given(st.data())
def test_any_shape(data):
    share, head_dim = data.draw(st.sampled_from(SHAPES))
    kv_heads = data.draw(st.integers(1, 3))
    block_size = data.draw(st.sampled_from([1, 3, 16, 64]))
    rows, first = [], 0
    for _ in range(data.draw(st.integers(1, 3))):
        q_len = data.draw(st.integers(5, 200))
        context = data.draw(st.integers(0, 300))
        step = data.draw(st.sampled_from([1, 2, 4]))  # keys of shards, of which each has one in so many
        seen = [(context + i) // step for i in range(q_len)]
        rows.append((seen, table(seen[-1], block_size, first)))
        first += -(-seen[-1] // block_size)
    case = case_of(*rows, heads=share * kv_heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
    if data.draw(st.booleans()):
        fused = torch.zeros(len(case.q), share * kv_heads + 3, head_dim, dtype=BF16)
        fused[:, 1:-2] = case.q
        case = replace(case, q=fused[:, 1:-2])
    check(case)


@pytest.mark.parametrize("keys", [1, TILE - 1, TILE, TILE + 1, TILE + 8, 1000])
@pytest.mark.parametrize("tokens", [1, 5, 6, 16, 17, 64, 65, 300])
def test_edges_of_tiles_groups_and_blocks(tokens, keys):
    q, k, v = tensors(tokens, keys)
    check_dense(q, k, v, torch.full((tokens,), keys), 0.125, *CpuPrefill().attend_dense(q, k, v, 0.125, None))


@pytest.mark.parametrize(
    ("tokens", "keys", "seen"),
    [
        (3, 7, [7, 0, 2]),
        (3, 4, [0, 0, 0]),
        (200, 700, [(i * 37) % 701 for i in range(200)]),
        (5, 5000, [4999, 0, 2048, 2049, 1]),
    ],
)
def test_b3_keys_at_hand_may_be_seen_in_any_order(tokens, keys, seen):
    q, k, v = tensors(tokens, keys)
    k[max(seen) :], v[max(seen) :] = math.nan, math.inf
    out, lse = CpuPrefill().attend_dense(q, k, v, 0.125, torch.tensor(seen))
    check_dense(q, k[: max(seen)], v[: max(seen)], torch.tensor(seen), 0.125, out, lse)


def test_how_many_keys_are_seen_may_be_of_any_integer_type():
    q, k, v = tensors(3, 7)
    seen = torch.tensor([7, 2, 5], dtype=torch.int32)
    check_dense(q, k, v, seen, 0.125, *CpuPrefill().attend_dense(q, k, v, 0.125, seen))


@pytest.mark.parametrize(("share", "kv_heads", "key_dim", "value_dim"), [(1, 4, 192, 128), (16, 1, 144, 128), (2, 2, 16, 48)])
def test_values_may_be_of_another_width(share, kv_heads, key_dim, value_dim):
    q, k, v = tensors(40, 150, share, kv_heads, key_dim, value_dim)
    seen = torch.arange(111, 151)
    out, lse = CpuPrefill().attend_dense(q, k, v, key_dim**-0.5, seen)
    check_dense(q, k, v, seen, key_dim**-0.5, out, lse)


def test_values_in_the_cache_may_be_parts_of_the_keys():
    """As of latents. Few queries too: the other program wants one width."""
    case = case_of(
        ([200], table(200, 16)), (list(range(70, 81)), table(80, 16, 20)), heads=8, kv_heads=1, head_dim=48, block_size=16
    )
    keys = case.pool.cache(0)[0]
    out, lse = CpuKernels().paged(case.q, keys, keys[..., :32], case.batch, SCALE)
    for row, (k, _) in zip(case.batch.rows, case.keys, strict=True):
        tokens = slice(row.q_start, row.q_start + row.q_len)
        check_dense(case.q[tokens], k, k[..., :32], case.batch.visible[tokens], SCALE, out[tokens], lse[tokens])


def test_any_strides():
    q, k, v = tensors(40, 90)
    wanted = CpuPrefill().attend_dense(q, k, v, 0.125, None)
    both = torch.cat((k, v), 1)
    apart = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (q, k, v)]
    for q_, k_, v_ in ((q, both[:, :2], both[:, 2:]), apart, (q, k.transpose(0, 1).contiguous().transpose(0, 1), v)):
        out, lse = CpuPrefill().attend_dense(q_, k_, v_, 0.125, None)
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])


# -- precision


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


# -- independence


def test_results_depend_neither_on_threads_nor_on_other_rows(threads):
    rows = [
        ([n - 1 - i // 2 for i in range(q, 0, -1)], table(n, 16, first))
        for n, q, first in ((900, 150, 0), (130, 40, 60), (7, 6, 70))
    ]
    case = case_of(*rows, heads=9, kv_heads=3, head_dim=64, block_size=16)
    out, lse = attended(case, use_threads=False)
    together = attended(case)
    assert torch.equal(out, together[0]) and torch.equal(lse, together[1])
    for row in case.batch.rows:
        tokens = slice(row.q_start, row.q_start + row.q_len)
        alone_out, alone_lse = attended(replace(case, batch=replace(case.batch, rows=(row,))))
        assert torch.equal(out[tokens], alone_out[tokens]) and torch.equal(lse[tokens], alone_lse[tokens])
        assert int(alone_lse.isnan().all(1).sum()) == len(out) - row.q_len


def test_queries_may_be_cut_anywhere():
    q, k, v = tensors(130, 500)
    seen = torch.arange(371, 501)
    out, lse = CpuPrefill().attend_dense(q, k, v, 0.125, seen)
    for cut in (5, 64, 97):
        for part in (slice(cut), slice(cut, None)):
            some_out, some_lse = CpuPrefill().attend_dense(q[part], k, v, 0.125, seen[part])
            assert torch.equal(some_out, out[part]) and torch.equal(some_lse, lse[part])


def test_layers_of_a_step_share_what_is_prepared_and_steps_do_not():
    case = case_of((list(range(100, 131)), table(130, 4)), head_dim=16)
    other = case_of(([3] * 7, [40]), head_dim=16)
    prefill = CpuPrefill()
    for each in (case, case, other, case):
        out, lse = torch.empty(each.q.shape), torch.empty(each.q.shape[:2])
        prefill.attend_paged(each.q, *each.pool.cache(0), each.batch.rows, each.batch, SCALE, out, lse)
        assert torch.equal(out, attended(each)[0])


def test_calls_from_many_threads():
    """As of ranks that are threads of one process."""
    case = case_of((list(range(400, 500)), table(500, 16)), head_dim=64, block_size=16)
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


@pytest.mark.parametrize("threads_", [1, 2, 16])
@pytest.mark.parametrize("lengths", [[5], [40, 7, 0], [512], [3000]])
def test_items_cover_the_queries_once_and_are_enough_for_the_threads(lengths, threads_):
    case = make(*(([0] * n, []) for n in lengths if n), head_dim=1)
    items = Items.of(case.batch.rows, 3, 2, threads_).items.tolist()
    found = sorted((start, head, first + i) for _, start, head, first, count in items for i in range(count))
    assert found == sorted((row.q_start, head, i) for row in case.batch.rows for head in range(3) for i in range(2 * row.q_len))
    assert all(0 < count <= GROUPS * GROUP and first % GROUP == 0 for *_, first, count in items)
    whole = 3 * sum(-(-2 * n // GROUP) for n in lengths)
    assert len(items) >= min(whole, BLOCKS_PER_THREAD * threads_)


# -- what is not finite


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


# -- who is attended how


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
