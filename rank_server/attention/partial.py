"""Attention of a step's queries on a CPU, over the keys of this shard's paged cache or over keys at hand.

They go through torch's flash operation in fp32, over pieces of the keys that stay in the processor's cache between their
conversion and their use.
"""

import torch
from torch import Tensor
from torch.nn import functional

from rank_server.attention.batch import AttentionBatch
from rank_server.attention.keys import DenseKeys, Keys, RowKeys, pieces
from rank_server.attention.merge import OnlineMerge, clear_empty
from rank_server.attention.portable import check_heads, nothing_seen

QUERY_TILE = 256
"""Queries of one row that are attended together; bounds masks and accumulators."""
WORKSPACE_BYTES = 2 * 1024 * 1024
"""Bound on each copy of keys or values, and on masks of a tile (but they hold at least one block)."""


def paged_partial(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> tuple[Tensor, Tensor]:
    """Partial attention (out [T, h, E] fp32, lse [T, h] fp32, natural log) of q [T, h, D] over this shard.

    k_cache, v_cache: [num_blocks, B, hk, D or E] with h a multiple of hk, else ValueError; query head i reads KV head
    i // (h / hk). A query sees the first `batch.visible` keys of its row; one that sees none gets exactly (0, −inf). Everything
    is fp32.
    """
    kv_heads = k_cache.shape[2]
    check_heads(q.shape[1], kv_heads)
    out, lse = nothing_seen(q, v_cache.shape[-1])
    for row in batch.rows:
        if row.local_len == 0:
            continue
        keys = RowKeys(row, k_cache, v_cache)
        for start in range(row.q_start, row.q_start + row.q_len, QUERY_TILE):
            tile = slice(start, min(start + QUERY_TILE, row.q_start + row.q_len))
            visible = batch.visible[tile] if row.q_len > 1 else None
            bounds = (int(visible[0]), int(visible[-1])) if visible is not None else (row.local_len, row.local_len)
            if bounds[1] > 0:
                out[tile], lse[tile] = _attend_tile(q[tile], keys, kv_heads, visible, bounds, scale, workspace_bytes)
    return out, lse


def dense_partial(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None = None, workspace_bytes: int = WORKSPACE_BYTES
) -> tuple[Tensor, Tensor]:
    """Partial attention (out [t, h, E] fp32, lse [t, h] fp32, natural log) of q [t, h, D] over keys that are not in the cache.

    k, v: [n, hk, D or E] with h a multiple of hk (else ValueError), any strides, n = 0 allowed; seen: [t] int64, query i sees
    the first seen[i] keys (0 … n, in any order), None: all n. A query that sees none gets exactly (0, −inf). Precision as
    `paged_partial`; temporary memory doesn't grow with t or n.
    """
    tokens = len(q)
    num_keys, kv_heads, _ = k.shape
    check_heads(q.shape[1], kv_heads)
    out, lse = nothing_seen(q, v.shape[-1])
    keys = DenseKeys(k, v)
    for start in range(0, tokens, QUERY_TILE):
        tile = slice(start, min(start + QUERY_TILE, tokens))
        if seen is None:
            visible, bounds = None, (num_keys, num_keys)
        else:
            visible = seen[tile]
            bounds = int(visible.min()), int(visible.max())
        if bounds[1] > 0:
            out[tile], lse[tile] = _attend_tile(q[tile], keys, kv_heads, visible, bounds, scale, workspace_bytes)
    return out, lse


def _attend_tile(
    q: Tensor, keys: Keys, kv_heads: int, visible: Tensor | None, bounds: tuple[int, int], scale: float, workspace_bytes: int
) -> tuple[Tensor, Tensor]:
    """Queries q [t, h, D] of one row, query i over the first visible[i] keys (None: the first bounds[0], all the same).

    bounds: the fewest and the most keys that a query sees, the most ≥ 1. The first bounds[0] keys need no mask.
    """
    by_all, by_any = bounds
    value_dim = keys.read_values(0, 1).shape[-1]
    width = max(q.shape[2], value_dim)
    wide = _wide(q, width)
    size = workspace_bytes // (kv_heads * width * torch.float32.itemsize)
    masked = min(size, workspace_bytes // (q.shape[0] * q.shape[1] // kv_heads * torch.float32.itemsize))
    merged = OnlineMerge(wide.shape, q.device)
    for lowest, highest, step in ((0, by_all, size), (by_all, by_any, masked)):
        for first, last in pieces(lowest, highest, step, keys.granule):
            k, v = (_wide(x.transpose(0, 1), width) for x in (keys.read_keys(first, last), keys.read_values(first, last)))
            seen = None if visible is None or last <= by_all else (visible - first).clamp_(0, last - first)
            out, lse = _attend(wide, k, v, scale, seen)
            if seen is not None:
                clear_empty(out, lse, seen)
            merged.add(out, lse)
    out, lse = merged.result()
    return out[..., :value_dim], lse


def _wide(x: Tensor, width: int) -> Tensor:
    """In fp32, with zeros up to the width that the operation wants for all: they change neither scores nor other sums."""
    wide = x.to(torch.float32)
    return wide if x.shape[-1] == width else functional.pad(wide, (0, width - x.shape[-1]))


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Dense attention of q [t, h, D] over k, v [hk, n, D], query i over the first seen[i] keys (None: all).

    The h / hk query heads of a KV head stand as rows of one matrix, so keys are read once for all of them. Rows with seen = 0
    come back undefined.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, num_keys, _ = k.shape
    share = heads // kv_heads
    packed = q.view(tokens, kv_heads, share, head_dim).transpose(0, 1).reshape(1, kv_heads, tokens * share, head_dim)
    mask = None
    if seen is not None:
        hidden = torch.arange(num_keys, device=q.device) >= seen.repeat_interleave(share).unsqueeze(1)
        mask = q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[None, None]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        packed, k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask, scale=scale
    )
    out = out.view(kv_heads, tokens, share, head_dim).transpose(0, 1).reshape(tokens, heads, head_dim)
    return out, lse.view(kv_heads, tokens, share).transpose(0, 1).reshape(tokens, heads)
