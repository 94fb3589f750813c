"""Decode attention over the paged cache in Triton: every row's keys are split among programs, partials merged by their LSE.

One program takes one split of one row's keys for all query heads of one KV head, so keys are read once. Import
it only where Triton is installed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rank_server.attention.merge import merge_partials
from rank_server.attention.paged_rows import PagedRows
from rank_server.attention.portable import check_heads

KEY_TILE = 64
"""Keys that a program looks at together."""
MAX_SPLITS = 32
PROGRAMS_PER_PROCESSOR = 2
"""Programs that keep one multiprocessor of the device busy."""
SMALLEST_DOT = 16
"""A dimension of a matrix product in Triton has at least this size."""


def splits_for(programs: int, longest: int, processors: int) -> int:
    """Splits of every row's keys: enough programs for the device, a key tile at least for each, at most MAX_SPLITS.

    programs: those of one split, rows · KV heads; longest: keys of the longest row.
    """
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // max(programs, 1))
    return max(1, min(wanted, -(-longest // KEY_TILE), MAX_SPLITS))


def paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: PagedRows, scale: float, splits: int
) -> tuple[Tensor, Tensor]:
    """Partial attention (out [R, h, D] fp32, lse [R, h] fp32, natural log) of q [R, h, D], query i over the keys of row i.

    k_cache, v_cache: [num_blocks, B, hk, D], any strides but the last, which is 1, the same for both; h a multiple of hk, else
    ValueError. A row without keys gets exactly (0, −inf). Products are taken in fp32 (caches are converted as they are read).
    """
    num_rows, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    check_heads(heads, kv_heads)
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError(f"caches with strides {k_cache.stride()} and {v_cache.stride()}: need equal ones that end in 1")
    out = q.new_empty((splits, num_rows, heads, head_dim), dtype=torch.float32)
    lse = q.new_empty((splits, num_rows, heads), dtype=torch.float32)
    if num_rows == 0:
        return out[0], lse[0]
    q = q.contiguous()
    share = heads // kv_heads
    _decode[(num_rows, kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        rows.tables,
        rows.lens,
        out,
        lse,
        scale,
        rows.tables.stride(0),
        *k_cache.stride()[:3],
        num_rows,
        heads,
        SHARE=share,
        SHARE_PADDED=max(SMALLEST_DOT, triton.next_power_of_2(share)),
        HEAD_DIM=head_dim,
        DIM_PADDED=max(SMALLEST_DOT, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        TILE=KEY_TILE,
    )
    return merge_partials(out, lse) if splits > 1 else (out[0], lse[0])


@triton.jit
def _decode(
    q_at,
    k_at,
    v_at,
    tables_at,
    lens_at,
    out_at,
    lse_at,
    scale,
    table_stride,
    block_stride,
    token_stride,
    head_stride,
    num_rows,
    heads,
    SHARE: tl.constexpr,
    SHARE_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_keys = tl.load(lens_at + row)
    per_split = tl.cdiv(tl.cdiv(num_keys, tl.num_programs(2)), TILE) * TILE
    first = split * per_split
    last = tl.minimum(first + per_split, num_keys)

    member = tl.arange(0, SHARE_PADDED)
    dim = tl.arange(0, DIM_PADDED)
    head = kv_head * SHARE + member
    is_head, is_dim = member < SHARE, dim < HEAD_DIM
    of_query = is_head[:, None] & is_dim[None, :]
    query = tl.load(q_at + (row * heads + head)[:, None] * HEAD_DIM + dim[None, :], mask=of_query, other=0.0).to(tl.float32)

    highest = tl.full([SHARE_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([SHARE_PADDED], tl.float32)
    summed = tl.zeros([SHARE_PADDED, DIM_PADDED], tl.float32)
    for start in range(first, last, TILE):
        index = start + tl.arange(0, TILE)
        present = index < last
        block = tl.load(tables_at + row * table_stride + index // BLOCK_SIZE, mask=present, other=0)
        at = block * block_stride + (index % BLOCK_SIZE) * token_stride + kv_head * head_stride
        # Masked, not multiplied away: what lies behind the last key may be NaN.
        of_key = present[:, None] & is_dim[None, :]
        key = tl.load(k_at + at[:, None] + dim[None, :], mask=of_key, other=0.0).to(tl.float32)
        value = tl.load(v_at + at[:, None] + dim[None, :], mask=of_key, other=0.0).to(tl.float32)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(present[None, :], scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - raised[:, None])
        shrink = tl.exp(highest - raised)
        total = total * shrink + tl.sum(weights, 1)
        summed = summed * shrink[:, None] + tl.dot(weights, value, input_precision="ieee")
        highest = raised

    result = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    logarithm = tl.where(total == 0.0, float("-inf"), highest + tl.log(tl.where(total == 0.0, 1.0, total)))
    place = (split * num_rows + row) * heads + head
    tl.store(out_at + place[:, None] * HEAD_DIM + dim[None, :], result, mask=of_query)
    tl.store(lse_at + place, logarithm, mask=is_head)
