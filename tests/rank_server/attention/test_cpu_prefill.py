"""Rows with many queries on a CPU, by the compiled program, against dense attention in float64: shapes, widths, strides."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rank_server.attention.cpu import CpuKernels
from rank_server.attention.cpu_prefill import CpuPrefill
from rank_server.attention.prefill_tile import TILE
from tests.rank_server.attention.paged_cases import CONSECUTIVE, SCALE, SCATTERED
from tests.rank_server.attention.prefill_cases import BF16, case_of, check, check_dense, needs_the_instructions, table, tensors

pytestmark = needs_the_instructions
SHAPES = [(2, 16), (1, 48), (3, 64), (8, 32), (5, 128), (1, 256)]
"""Query heads of a KV head, their width."""


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
