"""Attention over latents, absorbed and expanded, against dense float64 attention over explicit keys and values."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cp_layout.model_shape import MlaShape
from rank_server.attention import mla as module
from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.attention.cpu import CpuKernels
from rank_server.attention.latent import UpProjection, expanding_pays
from rank_server.attention.mla import absorbed_dense, absorbed_paged, expanded, paged_reader
from rank_server.kv_pool import KvPool
from tests.rank_server.attention.dense import dense_attention

SHAPE = MlaShape(q_lora_rank=None, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
SCALE = 0.3
HEADS, B = 3, 4
KERNELS = CpuKernels()


@dataclass(frozen=True)
class Case:
    """Rows of (visible latents per query, block table) over a pool where only what the rows own is not NaN."""

    q: Tensor
    up: UpProjection
    pool: KvPool
    batch: AttentionBatch
    latents: list[Tensor]

    def wanted(self, index: int) -> tuple[Tensor, Tensor]:
        """Dense attention of a row over keys and values of every head, spelled out in float64."""
        row, latents = self.batch.rows[index], self.latents[index].double()
        tokens = slice(row.q_start, row.q_start + row.q_len)
        compressed, shared = latents.split([SHAPE.kv_lora_rank, SHAPE.qk_rope_head_dim], 1)
        keys = torch.einsum("hdc,nc->nhd", self.up.w_uk.double(), compressed)
        keys = torch.cat((keys, shared[:, None].expand(-1, HEADS, -1)), -1)
        values = torch.einsum("hdc,nc->nhd", self.up.w_uv.double(), compressed)
        values = torch.nn.functional.pad(values, (0, keys.shape[-1] - values.shape[-1]))
        out, lse = dense_attention(self.q[tokens], keys, values, self.batch.visible[tokens], SCALE)
        return out[..., : SHAPE.v_head_dim], lse

    def check(self, atol: float = 2e-5) -> None:
        cache = self.pool.latents(0)
        absorbed, absorbed_lse = absorbed_paged(KERNELS, self.up.absorb(self.q), cache, SHAPE.kv_lora_rank, self.batch, SCALE)
        values = self.up.values(absorbed)
        for index, row in enumerate(self.batch.rows):
            tokens = slice(row.q_start, row.q_start + row.q_len)
            visible = self.batch.visible[tokens]
            whole = over_expanded(self, row)
            wanted_out, wanted_lse = self.wanted(index)
            for out, lse in ((values[tokens], absorbed_lse[tokens]), whole):
                assert lse.dtype == torch.float32
                torch.testing.assert_close(out.double(), wanted_out, rtol=0, atol=atol)
                torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=atol)
                assert (out[visible == 0] == 0).all()
                assert (lse[visible == 0] == -math.inf).all()


def over_expanded(case: Case, row: AttentionRow) -> tuple[Tensor, Tensor]:
    tokens, read = slice(row.q_start, row.q_start + row.q_len), paged_reader(case.pool.latents(0), row.block_table)
    return expanded(KERNELS, case.q[tokens], read, row.local_len, case.batch.visible[tokens], case.up, SCALE)


def make(*rows: tuple[list[int], list[int]], dtype: torch.dtype = torch.float32, cache: torch.dtype = torch.float32) -> Case:
    generator = torch.Generator().manual_seed(3)
    num_blocks = 2 + max((block for _, table in rows for block in table), default=0)
    pool = KvPool(1, num_blocks, B, 1, SHAPE.latent_dim, cache, "cpu", rows=1)
    pool.fill_nan(range(num_blocks))
    attention_rows, all_latents, visible = [], [], []
    for seen, table in rows:
        latents = torch.randn(seen[-1], SHAPE.latent_dim, generator=generator)
        slots = [table[j // B] * B + j % B for j in range(seen[-1])]
        pool.write_latents(0, latents, torch.tensor(slots, dtype=torch.int64))
        all_latents.append(latents.to(cache).to(dtype))
        attention_rows.append(AttentionRow(len(visible), len(seen), torch.tensor(table, dtype=torch.int64), seen[-1], seen[0]))
        visible += seen
    q = torch.randn(len(visible), HEADS, SHAPE.qk_head_dim, generator=generator).to(dtype)
    width = SHAPE.qk_nope_head_dim + SHAPE.v_head_dim
    up = UpProjection.of(SHAPE, torch.randn(HEADS, width, SHAPE.kv_lora_rank, generator=generator).to(dtype))
    batch = AttentionBatch(tuple(attention_rows), torch.full((len(visible),), -1), torch.tensor(visible))
    return Case(q, up, pool, batch, all_latents)


CONSECUTIVE, SCATTERED = [3, 4, 5, 6], [6, 2, 9, 1]


@pytest.mark.parametrize("table", [CONSECUTIVE, SCATTERED], ids=["consecutive blocks", "scattered blocks"])
@pytest.mark.parametrize("seen", [[1], [3], [4], [5], [13], [16], [13, 14, 15, 16], [0, 1, 1, 2], [0, 0], [3, 3, 3], [1, 2, 3]])
def test_b6_b7_every_query_sees_its_own_latents_and_nothing_stale(seen: list[int], table: list[int]) -> None:
    make((seen, table)).check()


@pytest.mark.parametrize("key_tile", [1, 3, 4, 5])
def test_tiles_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, key_tile: int) -> None:
    monkeypatch.setattr(module, "KEY_TILE", key_tile)
    make(([5], [8, 2]), ([0, 0, 1, 2, 2, 3], [0]), ([9, 10, 11, 12, 13], CONSECUTIVE), ([0], [])).check()


def test_c4_latents_are_kept_in_another_dtype_than_is_computed_in() -> None:
    make(([11, 12, 13], SCATTERED), cache=torch.float16).check()
    make(([11, 12, 13], SCATTERED), cache=torch.bfloat16).check()


def test_bfloat16_stays_near() -> None:
    make(([11, 12, 13], SCATTERED), dtype=torch.bfloat16, cache=torch.bfloat16).check(atol=0.15)


def test_memory_beside_the_cache_is_bounded_by_the_tiles() -> None:
    """C6: with twice the context, nothing larger is allocated; both fill the workspace."""
    sizes = []
    for tiles in (40, 80):
        context = tiles * module.KEY_TILE
        case = make((list(range(context - 3, context + 1)), list(range(context // B))))
        with Allocations() as seen:
            absorbed_paged(KERNELS, case.up.absorb(case.q), case.pool.latents(0), SHAPE.kv_lora_rank, case.batch, SCALE)
            over_expanded(case, case.batch.rows[0])
        sizes.append(seen.largest)
    assert sizes[0] == sizes[1]


class Allocations(TorchDispatchMode):
    """The largest tensor that is not a view."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and not func.is_view:
                self.largest = max(self.largest, tensor.numel())
        return out


def test_expanding_pays_for_many_queries_only() -> None:
    deepseek = MlaShape(None, 512, 128, 64, 128)
    assert not expanding_pays(deepseek, 170)
    assert expanding_pays(deepseek, 171)
    narrow = MlaShape(None, 8, 16, 4, 16)
    assert not expanding_pays(narrow, 1 << 20)


@pytest.mark.parametrize("seen", [None, [0, 1, 5, 9], [9, 9, 9, 9], [0, 0, 0, 0]])
def test_latents_need_not_be_in_the_cache(seen: list[int] | None) -> None:
    case = make(([9] * 4, SCATTERED))
    latents, visible = case.latents[0], None if seen is None else torch.tensor(seen)
    wanted_out, wanted_lse = replace(case, batch=replace(case.batch, visible=torch.tensor(seen or [9] * 4))).wanted(0)
    absorbed, absorbed_lse = absorbed_dense(KERNELS, case.up.absorb(case.q), latents, SHAPE.kv_lora_rank, visible, SCALE)
    whole = expanded(KERNELS, case.q, lambda first, last: latents[first:last], 9, visible, case.up, SCALE)
    for out, lse in ((case.up.values(absorbed), absorbed_lse), whole):
        torch.testing.assert_close(out.double(), wanted_out, rtol=0, atol=2e-5)
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=2e-5)


def test_matrices_of_all_heads_lie_without_gaps_and_once() -> None:
    weight = torch.arange(2 * 9 * 10.0).view(2, 9, 10)
    up = UpProjection.of(MlaShape(None, 10, 2, 2, 7), weight)
    assert torch.equal(torch.cat((up.w_uk, up.w_uv), 1), weight)
    assert up.w_uk.is_contiguous() and up.w_uv.is_contiguous()
    assert len({x.untyped_storage().data_ptr() for x in (up.w_uk, up.w_uv, up.both)}) == 1
    assert up.both.untyped_storage().nbytes() == weight.nbytes


def test_values_may_be_wider_than_keys() -> None:
    shape = MlaShape(None, 10, 2, 2, 7)
    generator = torch.Generator().manual_seed(1)
    up = UpProjection.of(shape, torch.randn(2, 9, 10, generator=generator))
    q, latents = torch.randn(3, 2, 4, generator=generator), torch.randn(5, 12, generator=generator)
    keys, values = up.expand(latents)
    wanted = (torch.einsum("thd,hnd->htn", q, keys) * SCALE).softmax(-1) @ values
    out, _ = expanded(KERNELS, q, lambda first, last: latents[first:last], 5, None, up, SCALE)
    torch.testing.assert_close(out, wanted.transpose(0, 1), rtol=0, atol=2e-5)
