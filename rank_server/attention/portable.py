"""Partial attention in operations that every device has: what a device without a kernel of its own computes with."""

import torch
from torch import Tensor

from rank_server.attention.batch import AttentionRow
from rank_server.attention.merge import OnlineMerge

QUERY_TILE = 256
KEY_TILE = 1024
"""Queries and keys that are attended together; they bound the scores to QUERY_TILE · KEY_TILE entries per query head."""


def dense_portable(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`partial.dense_partial` by another way: same arguments, results and errors."""
    check_heads(q.shape[1], k.shape[1])
    out, lse = nothing_seen(q, v.shape[-1])
    for tile in tiles(len(q), QUERY_TILE):
        merged = OnlineMerge(out[tile].shape, q.device)
        for keys in tiles(len(k), KEY_TILE):
            visible = None if seen is None else seen[tile] - keys.start
            merged.add(*_attend(q[tile], k[keys], v[keys], scale, visible))
        out[tile], lse[tile] = merged.result()
    return out, lse


def paged_row(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, row: AttentionRow, table: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Partial attention (out [t, h, E], lse [t, h], fp32) of one row's queries q [t, h, D] over its keys in the cache.

    table: the row's block table on q's device; visible: [t] keys that each query sees.
    """
    block_size = k_cache.shape[1]
    step = max(1, KEY_TILE // block_size) * block_size
    out, lse = nothing_seen(q, v_cache.shape[-1])
    for tile in tiles(len(q), QUERY_TILE):
        merged = OnlineMerge(out[tile].shape, q.device)
        for keys in tiles(row.local_len, step):
            blocks = table[keys.start // block_size : -(-keys.stop // block_size)]
            k, v = (cache.index_select(0, blocks).flatten(0, 1)[: keys.stop - keys.start] for cache in (k_cache, v_cache))
            merged.add(*_attend(q[tile], k, v, scale, visible[tile] - keys.start))
        out[tile], lse[tile] = merged.result()
    return out, lse


def nothing_seen(q: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(out [T, h, width], lse [T, h]) of queries q [T, h, D] that see no keys."""
    out = q.new_zeros((*q.shape[:2], width), dtype=torch.float32)
    return out, q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)


def check_heads(heads: int, kv_heads: int) -> None:
    """ValueError unless every KV head serves the same number of query heads."""
    if heads % kv_heads != 0:
        raise ValueError(f"{heads} query heads can't share {kv_heads} KV heads evenly")


def tiles(count: int, size: int) -> list[slice]:
    """Consecutive slices of at most `size` that cover [0, count)."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """q [t, h, D] over k [n, hk, D] and v [n, hk, E], query i over the first seen[i] of them (any integer; None: all), fp32."""
    tokens, heads, head_dim = q.shape
    num_keys, kv_heads, _ = k.shape
    share = heads // kv_heads
    # The query heads of a KV head are rows of one matrix, so that its keys are read once for all of them.
    packed = q.to(torch.float32).view(tokens, kv_heads, share, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
    scores = packed @ k.to(torch.float32).permute(1, 2, 0) * scale
    if seen is not None:
        hidden = torch.arange(num_keys, device=q.device) >= seen.repeat_interleave(share).unsqueeze(1)
        scores.masked_fill_(hidden, -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    highest = torch.where(highest == -torch.inf, 0.0, highest)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = weights @ v.to(torch.float32).transpose(0, 1) / torch.where(total == 0, 1.0, total)
    out = out.view(kv_heads, tokens, share, -1).transpose(0, 1).reshape(tokens, heads, v.shape[-1])
    lse = (highest + total.log()).view(kv_heads, tokens, share).transpose(0, 1).reshape(tokens, heads)
    return out, lse
