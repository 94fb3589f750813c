"""Seeded cases of paged attention, and what their results must be."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.attention.partial import paged_partial
from rank_server.kv_pool import KvPool
from tests.rank_server.attention.dense import dense_attention

SCALE = 0.3
CONSECUTIVE, SCATTERED = [3, 4, 5, 6], [6, 2, 9, 1]


@dataclass(frozen=True)
class Case:
    """Rows of (visible keys per query, block table) over a pool where only what the rows own is not NaN."""

    q: Tensor
    pool: KvPool
    batch: AttentionBatch
    keys: list[tuple[Tensor, Tensor]]

    def check(self, atol: float = 2e-6, **options: int) -> None:
        """`paged_partial` with its options gives what is expected."""
        out, lse = paged_partial(self.q, *self.pool.cache(0), self.batch, SCALE, **options)
        assert out.dtype == lse.dtype == torch.float32
        self.expect(out, lse, atol)

    def expect(self, out: Tensor, lse: Tensor, atol: float = 2e-6) -> None:
        """The results of all rows are those of dense attention; a query without keys has exactly none."""
        for row, (k, v) in zip(self.batch.rows, self.keys, strict=True):
            tokens = slice(row.q_start, row.q_start + row.q_len)
            visible = self.batch.visible[tokens]
            wanted_out, wanted_lse = dense_attention(self.q[tokens], k, v, visible, SCALE)
            torch.testing.assert_close(out[tokens].double(), wanted_out, rtol=0, atol=atol)
            torch.testing.assert_close(lse[tokens].double(), wanted_lse, rtol=1e-6, atol=atol)
            assert (out[tokens][visible == 0] == 0).all()
            assert (lse[tokens][visible == 0] == -math.inf).all()


def make(
    *rows: tuple[list[int], list[int]],
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    magnitude: float = 1.0,
) -> Case:
    """A case of rows; the keys of a row are as many as its last query sees."""
    generator = torch.Generator().manual_seed(3)
    num_blocks = 2 + max((block for _, table in rows for block in table), default=0)
    pool = KvPool(1, num_blocks, block_size, kv_heads, head_dim, dtype, "cpu")
    pool.fill_nan(range(num_blocks))
    attention_rows, keys, visible = [], [], []
    for seen, table in rows:
        local_len = seen[-1]
        k, v = (magnitude * torch.randn(local_len, kv_heads, head_dim, generator=generator) for _ in range(2))
        slots = [table[j // block_size] * block_size + j % block_size for j in range(local_len)]
        pool.write(0, k, v, torch.tensor(slots, dtype=torch.int64))
        keys.append((k.to(dtype), v.to(dtype)))
        table_tensor = torch.tensor(table, dtype=torch.int64)
        attention_rows.append(AttentionRow(len(visible), len(seen), table_tensor, local_len, seen[0]))
        visible += seen
    q = torch.randn(len(visible), heads, head_dim, generator=generator)
    batch = AttentionBatch(tuple(attention_rows), torch.full((len(visible),), -1), torch.tensor(visible))
    return Case(q, pool, batch, keys)
