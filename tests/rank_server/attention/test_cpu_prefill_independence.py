"""Compiled prefill gives the same bits whatever else is computed, by how many threads, in how many pieces."""

import threading
from dataclasses import replace

import pytest
import torch

from rank_server.attention.cpu_prefill import BLOCKS_PER_THREAD, CpuPrefill, Items
from rank_server.attention.prefill_tile import GROUP, GROUPS
from tests.rank_server.attention.paged_cases import SCALE, make
from tests.rank_server.attention.prefill_cases import attended, case_of, needs_the_instructions, table, tensors

pytestmark = needs_the_instructions


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
