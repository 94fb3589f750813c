"""What a GPU would compute, computed here: torch operations as they are, the Triton kernel by Triton's interpreter.

The kernel runs compiled only in the tests marked `gpu`.
"""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch

from rank_server.attention.batch import AttentionBatch
from rank_server.attention.cpu import CpuKernels
from rank_server.attention.gpu import GpuKernels
from rank_server.attention.kernels import kernels_for
from rank_server.attention.paged_rows import PagedRows
from rank_server.attention.portable import KEY_TILE, QUERY_TILE, dense_portable
from rank_server.kv_pool import KvPool
from tests.devices import CPU
from tests.rank_server.attention.dense import dense_attention
from tests.rank_server.attention.paged_cases import CONSECUTIVE, SCALE, SCATTERED, Case, make

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel is compiled: see the gpu tests")
WAYS = [
    pytest.param(False, id="torch"),
    pytest.param(True, id="triton", marks=[needs_triton, interpreted]),
]


def check(case: Case, use_triton: bool, processors: int = 8, atol: float = 2e-6) -> None:
    kernels = GpuKernels(processors, use_triton)
    out, lse = kernels.paged(case.q, *case.pool.cache(0), case.batch, SCALE)
    assert out.dtype == lse.dtype == torch.float32
    case.expect(out, lse, atol)


@pytest.mark.parametrize("use_triton", WAYS)
@pytest.mark.parametrize("table", [CONSECUTIVE, SCATTERED], ids=["consecutive blocks", "scattered blocks"])
@pytest.mark.parametrize("seen", [[1], [3], [4], [5], [13], [16], [13, 14, 15, 16], [0, 1, 1, 2], [0, 0], [3, 3, 3], [1, 2, 3]])
def test_b6_b7_every_query_sees_its_own_keys_and_nothing_stale(seen, table, use_triton):
    check(make((seen, table)), use_triton)


@pytest.mark.parametrize("use_triton", WAYS)
def test_b1_rows_without_keys_are_exactly_empty_between_others(use_triton):
    check(make(([0], []), ([9], SCATTERED), ([0], [11]), ([0, 0, 1], [12]), ([2], [13])), use_triton)
    check(make(([0], []), ([0], [3])), use_triton)


@pytest.mark.parametrize("use_triton", WAYS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 1, 8), (6, 2, 64), (6, 3, 20), (6, 6, 16), (40, 2, 24)])
def test_query_heads_share_kv_heads_in_order(heads, kv_heads, head_dim, use_triton):
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    check(make(([7], SCATTERED), ([1], [3]), ([2, 3, 4], [11, 12]), **sizes), use_triton, atol=4e-6)


@pytest.mark.parametrize("use_triton", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_caches_are_computed_in_fp32(dtype, use_triton):
    check(make(([11], SCATTERED), ([4, 5, 6], [11, 12]), dtype=dtype), use_triton)


@pytest.mark.parametrize("use_triton", WAYS)
def test_b10_huge_low_precision_keys_stay_finite(use_triton):
    case = make(([11], SCATTERED), dtype=torch.float16, magnitude=2.0e4)
    out, lse = GpuKernels(8, use_triton).paged(case.q, *case.pool.cache(0), case.batch, SCALE)
    wanted, wanted_lse = dense_attention(case.q, *case.keys[0], case.batch.visible, SCALE)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-3, atol=30.0)


@pytest.mark.parametrize("use_triton", WAYS)
def test_heads_that_do_not_divide_are_refused(use_triton):
    with pytest.raises(ValueError, match="4 query heads can't share 3 KV heads"):
        check(make(([1], [0]), heads=4, kv_heads=3), use_triton)


@needs_triton
@interpreted
@pytest.mark.parametrize(("heads", "head_dim", "fits"), [(32, 128, True), (32, 129, False), (33, 128, False)])
def test_what_the_kernel_is_too_small_for_goes_through_torch(monkeypatch, heads, head_dim, fits):
    from rank_server.attention import triton_decode

    calls = []
    paged_decode = triton_decode.paged_decode
    monkeypatch.setattr(triton_decode, "paged_decode", lambda *args: calls.append(args) or paged_decode(*args))
    check(make(([3], [1]), heads=heads, kv_heads=1, head_dim=head_dim), use_triton=True, atol=1e-5)
    assert len(calls) == fits


@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
@pytest.mark.parametrize("processors", [1, 6, 1000], ids=["one split", "some splits", "most splits"])
@needs_triton
@interpreted
def test_long_rows_are_split_and_merged(block_size, processors):
    """Lengths around a tile of 64 keys, and a split that gets none of a shorter row's keys."""
    lengths = [63, 64, 65, 700, 0, 1]
    first = [sum(-(-n // block_size) + 1 for n in lengths[:i]) for i in range(len(lengths))]
    rows = [([n], list(range(f + -(-n // block_size), f, -1))) for n, f in zip(lengths, first, strict=True)]
    check(make(*rows, block_size=block_size), use_triton=True, processors=processors, atol=4e-6)


@pytest.mark.parametrize("use_triton", WAYS)
def test_a_step_is_prepared_once_for_all_its_layers_and_anew_for_the_next(use_triton, monkeypatch):
    made = []
    of = PagedRows.of
    monkeypatch.setattr(PagedRows, "of", lambda rows, device: made.append(len(rows)) or of(rows, device))
    kernels, one, two = GpuKernels(8, use_triton), make(([7], SCATTERED)), make(([4], CONSECUTIVE), ([3], [8]))
    for case in (one, one, two, two, one):
        out, _ = kernels.paged(case.q, *case.pool.cache(0), case.batch, SCALE)
        wanted, _ = CpuKernels().paged(case.q, *case.pool.cache(0), case.batch, SCALE)
        torch.testing.assert_close(out, wanted, rtol=0, atol=2e-6)
    assert len(made) == 3


def test_long_chunks_cross_tiles_of_queries_and_of_keys():
    queries = 2 * QUERY_TILE + 5
    seen = [KEY_TILE - 100 + i // 2 for i in range(queries)]
    check(make((seen, list(range(400, 0, -1)))), use_triton=False, atol=5e-6)


@pytest.mark.parametrize("num_keys", [0, 1, 7, KEY_TILE, KEY_TILE + 3])
@pytest.mark.parametrize("limited", [False, True])
def test_keys_outside_the_cache(num_keys, limited):
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((5, 6, 8), (num_keys, 2, 8), (num_keys, 2, 8)))
    seen = torch.tensor([0, num_keys, num_keys // 2, 0, num_keys]) if limited else torch.full((5,), num_keys)
    out, lse = GpuKernels(8).dense(q, k, v, SCALE, seen if limited else None)
    wanted_out, wanted_lse = dense_attention(q, k, v, seen, SCALE)
    torch.testing.assert_close(out.double(), wanted_out, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=2e-6)
    assert (lse[seen == 0] == -math.inf).all() and (out[seen == 0] == 0).all()
    with pytest.raises(ValueError, match="6 query heads can't share 4"):
        dense_portable(q, torch.zeros(1, 4, 8), torch.zeros(1, 4, 8), SCALE)


@needs_triton
@pytest.mark.parametrize(
    ("programs", "longest", "processors", "splits"),
    [(1, 64, 100, 1), (1, 65, 100, 2), (3, 100_000, 132, 32), (48, 100_000, 132, 6), (500, 100_000, 132, 1), (0, 0, 132, 1)],
)
def test_splits_fill_the_device_and_no_more(programs, longest, processors, splits):
    from rank_server.attention.triton_decode import splits_for

    assert splits_for(programs, longest, processors) == splits


@needs_triton
@pytest.mark.parametrize("cache", ["bf16", pytest.param("fp32", marks=pytest.mark.sweep)])
def test_the_kernel_compiles_for_a_gpu(cache, tmp_path):
    """To machine code, which needs no GPU; the interpreter accepts more than the compiler does."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.rank_server.attention.compile_kernel", cache],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Above 99 KiB of shared memory only some GPUs could run it.
    assert 0 < int(done.stdout) <= 99 << 10


@needs_triton
def test_caches_that_the_kernel_cannot_address_are_refused():
    from rank_server.attention.triton_decode import paged_decode

    cache = torch.zeros(2, 4, 2, 8)
    rows = PagedRows.of(make(([3], [1])).batch.rows, CPU)
    turned = cache.transpose(1, 3)
    for k, v in ((cache, cache.clone().transpose(0, 1).contiguous().transpose(0, 1)), (turned, turned)):
        with pytest.raises(ValueError, match="caches with strides"):
            paged_decode(torch.zeros(1, 2, 8), k, v, rows, SCALE, 1)


def test_kernels_by_device():
    assert isinstance(kernels_for(CPU), CpuKernels)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_the_result_is_that_of_the_cpu(dtype):
    case = make(([700], list(range(200, 20, -1))), ([0], []), ([13, 14, 15], SCATTERED), dtype=dtype, head_dim=64)
    device = torch.device("cuda", 0)
    pool = KvPool(1, case.pool.num_blocks, case.pool.block_size, 2, 64, dtype, device)
    for there, here in zip(pool.cache(0), case.pool.cache(0), strict=True):
        there.copy_(here)
    batch = AttentionBatch(case.batch.rows, case.batch.slots.to(device), case.batch.visible.to(device))
    out, lse = kernels_for(device).paged(case.q.to(device), *pool.cache(0), batch, SCALE)
    wanted, wanted_lse = CpuKernels().paged(case.q, *case.pool.cache(0), case.batch, SCALE)
    torch.testing.assert_close(out.cpu(), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.cpu(), wanted_lse, rtol=1e-5, atol=1e-5)
