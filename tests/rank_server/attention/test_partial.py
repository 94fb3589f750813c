import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.attention.partial import QUERY_TILE, paged_partial
from rank_server.kv_pool import KvPool
from tests.rank_server.attention.dense import dense_attention
from tests.rank_server.attention.paged_cases import CONSECUTIVE, SCALE, SCATTERED, make


@pytest.mark.parametrize("table", [CONSECUTIVE, SCATTERED], ids=["consecutive blocks", "scattered blocks"])
@pytest.mark.parametrize("seen", [[1], [3], [4], [5], [13], [16], [13, 14, 15, 16], [0, 1, 1, 2], [0, 0], [3, 3, 3], [1, 2, 3]])
def test_b6_b7_every_query_sees_its_own_keys_and_nothing_stale(seen: list[int], table: list[int]) -> None:
    make((seen, table)).check()


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_query_heads_share_kv_heads_in_order(kv_heads: int) -> None:
    make(([7], SCATTERED), ([2, 3, 4], [11, 12]), heads=6, kv_heads=kv_heads).check()


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="4 query heads can't share 3 KV heads"):
        make(([1], [0]), heads=4, kv_heads=3).check()


def test_b1_rows_that_this_shard_has_nothing_for_are_exactly_empty() -> None:
    make(([0], []), ([9], SCATTERED), ([0, 0, 0], [11]), ([0, 0, 1], [12])).check()


def test_tokens_outside_all_rows_stay_empty() -> None:
    case = make(([2], [0]))
    q = torch.cat([case.q, case.q])
    out, lse = paged_partial(q, *case.pool.cache(0), case.batch, SCALE)
    assert not out[1].any()
    assert (lse[1] == -math.inf).all()


def test_blocks_shared_by_two_rows() -> None:
    case = make(([13], SCATTERED), ([13], SCATTERED))
    for row in range(2):
        case.keys[row] = case.keys[1]
    case.check()


def test_a_table_longer_than_the_keys() -> None:
    make(([5], [*CONSECUTIVE, 7, 8]), ([5], [12, 10, 11])).check()


@pytest.mark.parametrize("table", [list(range(200)), list(range(199, -1, -1))], ids=["consecutive", "scattered"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_long_chunks_cross_query_tiles(table: list[int], interleaved: bool) -> None:
    queries = 2 * QUERY_TILE + 5
    seen = [50 + (i // 3 if interleaved else i) for i in range(queries)]
    make((seen, table), ([7], [201, 202])).check(atol=5e-6)


@pytest.mark.parametrize("workspace_bytes", [1, 2 * 4 * 2 * 8 * 4 * 2])
@pytest.mark.parametrize("table", [CONSECUTIVE, SCATTERED])
def test_small_workspace_gives_the_same(workspace_bytes: int, table: list[int]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for seen in ([15], [14, 15, 16], [0, 3, 6, 9, 12], [1, 1, 2]):
            make((seen, table), dtype=dtype).check(workspace_bytes=workspace_bytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_caches_are_computed_in_fp32(dtype: torch.dtype) -> None:
    make(([11], SCATTERED), ([4, 5, 6], [11, 12]), dtype=dtype).check()


def test_b10_huge_low_precision_keys_stay_finite() -> None:
    case = make(([11], SCATTERED), dtype=torch.float16, magnitude=2.0e4)
    out, lse = paged_partial(case.q, *case.pool.cache(0), case.batch, SCALE)
    assert out.isfinite().all() and lse.isfinite().all()
    wanted, wanted_lse = dense_attention(case.q, *case.keys[0], case.batch.visible, SCALE)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-3, atol=30.0)


def test_low_precision_queries() -> None:
    case = make(([11], SCATTERED))
    out, _ = paged_partial(case.q.bfloat16(), *case.pool.cache(0), case.batch, SCALE)
    wanted, _ = dense_attention(case.q.bfloat16(), *case.keys[0], case.batch.visible, SCALE)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-6)


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in inputs:
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("scattered", [False, True])
def test_o2_a_long_chunk_over_a_long_context_stays_within_the_workspace(scattered: bool) -> None:
    queries, context, block_size, heads = 512, 8192, 64, 8
    blocks = (context + queries) // block_size
    table = torch.arange(blocks)
    pool = KvPool(1, blocks, block_size, 2, 64, torch.bfloat16 if scattered else torch.float32, "cpu")
    row = AttentionRow(0, queries, table.flip(0) if scattered else table, context + queries, context + 1)
    batch = AttentionBatch((row,), torch.full((queries,), -1), torch.arange(context + 1, context + queries + 1))
    with LargestTensor() as largest:
        paged_partial(torch.randn(queries, heads, 64), *pool.cache(0), batch, SCALE, workspace_bytes=1 << 20)
    assert largest.nbytes <= 2 << 20
    assert largest.nbytes < queries * context * heads * 4 / 50


def test_consecutive_blocks_are_read_without_a_copy() -> None:
    pool = KvPool(1, 300, 16, 2, 64, torch.float32, "cpu")
    row = AttentionRow(0, 1, torch.arange(5, 295), 290 * 16, 290 * 16)
    batch = AttentionBatch((row,), torch.tensor([-1]), torch.tensor([290 * 16]))
    with LargestTensor() as largest:
        paged_partial(torch.randn(1, 4, 64), *pool.cache(0), batch, SCALE)
    scores = 4 * 290 * 16 * 4
    assert largest.nbytes < 1.1 * scores
