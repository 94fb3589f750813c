"""Attention of a step's queries over the keys of this shard, read from the paged cache."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.attention.keys import RowKeys
from rank_server.attention.merge import OnlineMerge, clear_empty, merge_partials

KEY_TILE = 2048
"""Keys outside the cache that a tile of queries is attended over at a time."""
QUERY_TILE = 256
"""Queries of one row that are attended together; bounds the causal mask to QUERY_TILE² entries per query head of a KV head."""
WORKSPACE_BYTES = 32 * 1024 * 1024
"""Bound on the copies of keys and values that are alive at a time."""


def paged_partial(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> tuple[Tensor, Tensor]:
    """Partial attention (out [T, h, D] fp32, lse [T, h] fp32, natural log) of q [T, h, D] over this shard.

    k_cache, v_cache: [num_blocks, B, hk, D] with h a multiple of hk; query head i reads KV head i // (h / hk), else ValueError.
    A query sees the first `batch.visible` keys of its row; one that sees none gets exactly (0, −inf). All arithmetic is fp32.
    """
    num_tokens, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    if heads % kv_heads != 0:
        raise ValueError(f"{heads} query heads can't share {kv_heads} KV heads evenly")
    out = q.new_zeros((num_tokens, heads, head_dim), dtype=torch.float32)
    lse = q.new_full((num_tokens, heads), -torch.inf, dtype=torch.float32)
    for row in batch.rows:
        if row.local_len == 0:
            continue
        keys = RowKeys(row, k_cache, v_cache, workspace_bytes)
        for first, last in _query_tiles(row):
            visible = batch.visible[first:last]
            seen_by_all, seen_by_any = int(visible[0]), int(visible[-1])
            if seen_by_any == 0:
                continue
            partials = _partials(q[first:last].to(torch.float32), keys, visible, seen_by_all, seen_by_any, scale)
            tile_out, tile_lse = next(partials)
            for more_out, more_lse in partials:
                tile_out, tile_lse = merge_partials([tile_out, more_out], torch.stack([tile_lse, more_lse]))
            out[first:last], lse[first:last] = tile_out, tile_lse
    return out, lse


def dense_partial(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Partial attention (out [t, h, D] fp32, lse [t, h] fp32, natural log) of q [t, h, D] over keys that are not in the cache.

    k, v: [n, hk, D] with h a multiple of hk (else ValueError), any strides, n = 0 allowed; seen: [t] int64, query i sees the
    first seen[i] keys (0 … n, in any order), None: all n. A query that sees none gets exactly (0, −inf). All arithmetic is
    fp32, and temporary memory doesn't grow with t or n.
    """
    tokens, heads, head_dim = q.shape
    num_keys, kv_heads, _ = k.shape
    if heads % kv_heads != 0:
        raise ValueError(f"{heads} query heads can't share {kv_heads} KV heads evenly")
    out = q.new_zeros((tokens, heads, head_dim), dtype=torch.float32)
    lse = q.new_full((tokens, heads), -torch.inf, dtype=torch.float32)
    for first in range(0, tokens, QUERY_TILE):
        tile = slice(first, min(first + QUERY_TILE, tokens))
        merged = OnlineMerge(out[tile].shape, q.device)
        last_key = num_keys if seen is None else int(seen[tile].max())
        for start in range(0, last_key, KEY_TILE):
            keys = slice(start, min(start + KEY_TILE, last_key))
            piece_k, piece_v = (x[keys].transpose(0, 1).to(torch.float32) for x in (k, v))
            visible = None if seen is None else (seen[tile] - start).clamp_(0, keys.stop - start)
            part = _attend(q[tile].to(torch.float32), piece_k, piece_v, scale, visible)
            if visible is not None:
                clear_empty(*part, visible)
            merged.add(*part)
        out[tile], lse[tile] = merged.result()
    return out, lse


def _query_tiles(row: AttentionRow) -> list[tuple[int, int]]:
    end = row.q_start + row.q_len
    return list(pairwise([*range(row.q_start, end, QUERY_TILE), end]))


def _partials(
    q: Tensor, keys: RowKeys, visible: Tensor, seen_by_all: int, seen_by_any: int, scale: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Partials of consecutive queries q [t, h, D] of one row, over disjoint pieces of its keys.

    The first seen_by_all keys need no mask; those up to seen_by_any became visible inside the tile.
    """
    for k, v in keys.pieces(0, seen_by_all):
        yield _attend(q, k, v, scale, None)
    first = seen_by_all
    for k, v in keys.pieces(seen_by_all, seen_by_any):
        seen = (visible - first).clamp_(min=0)
        out, lse = _attend(q, k, v, scale, seen)
        clear_empty(out, lse, seen)
        yield out, lse
        first += k.shape[1]


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
