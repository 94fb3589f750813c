"""Seeded cases of attention with many queries in bf16, by the compiled program, and what their results must be."""

import math
from dataclasses import replace

import pytest
import torch

from rank_server.attention.cpu_prefill import CpuPrefill, suits
from rank_server.compiled import avx512
from tests.rank_server.attention.dense import dense_attention
from tests.rank_server.attention.paged_cases import SCALE, make

needs_the_instructions = pytest.mark.skipif(
    not avx512.available(), reason="this processor multiplies no bf16 numbers in vectors"
)
BF16 = torch.bfloat16
WEIGHT = 2.0**-9
"""What rounding to bf16 may change of a weight."""


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
    """A result is that of dense attention, but for weights that are rounded to bf16."""
    wanted, wanted_lse = dense_attention(q, k, v, visible, scale)
    largest = v.abs().max().double() if len(v) else 0.0
    # An error of a weight moves the result towards or away from its value.
    assert ((out.double() - wanted).abs() <= 2 * WEIGHT * largest + 1e-5).all()
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=1.01 * WEIGHT)
    assert (out[visible == 0] == 0).all()
    assert (lse[visible == 0] == -math.inf).all()


def check(case, use_threads=None):
    """As `check_dense`, for all rows of a case."""
    out, lse = attended(case, use_threads)
    for row, (k, v) in zip(case.batch.rows, case.keys, strict=True):
        tokens = slice(row.q_start, row.q_start + row.q_len)
        check_dense(case.q[tokens], k, v, case.batch.visible[tokens], SCALE, out[tokens], lse[tokens])


def tensors(tokens, num_keys, share=3, kv_heads=2, key_dim=64, value_dim=64, seed=0, magnitude=1.0):
    """Seeded q [tokens, kv_heads · share, key_dim], k [num_keys, kv_heads, key_dim], v [num_keys, kv_heads, value_dim]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, kv_heads * share, key_dim), (num_keys, kv_heads, key_dim), (num_keys, kv_heads, value_dim)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return (q * magnitude).to(BF16), k.to(BF16), v.to(BF16)
