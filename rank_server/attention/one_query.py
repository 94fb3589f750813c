"""One query token over many keys, in fp32: what decoding does.

Time goes into reading keys and values. They are turned into fp32 tile by tile, each tile small enough to stay in a core's
second-level cache until it has been multiplied; the query heads of a KV head are rows of one matrix, so that a key is read once
for all of them.
"""

import torch
from torch import Tensor

from rank_server.attention.keys import Keys, pieces
from rank_server.attention.merge import OnlineMerge

TILE_BYTES = 512 * 1024
"""One tile of keys or values in fp32."""
SCORES = 128 * 1024
"""Scores that are held at a time."""


def attend_one(q: Tensor, keys: Keys, kv_heads: int, num_keys: int, scale: float, tile_bytes: int) -> tuple[Tensor, Tensor]:
    """Attention (out [h, D], lse [h], fp32) of one query token q [h, D] over the first num_keys ≥ 1 keys."""
    heads, head_dim = q.shape
    packed = (q.to(torch.float32) * scale).reshape(kv_heads, heads // kv_heads, head_dim)
    tile = max(1, tile_bytes // (kv_heads * head_dim * torch.float32.itemsize))
    block = max(tile, SCORES // heads)
    if num_keys <= block:
        return _attend_block(packed, keys, 0, num_keys, tile)
    merged = OnlineMerge(q.shape, q.device)
    for first, last in pieces(0, num_keys, block, keys.granule):
        merged.add(*_attend_block(packed, keys, first, last, tile))
    return merged.result()


def _attend_block(q: Tensor, keys: Keys, first: int, last: int, tile: int) -> tuple[Tensor, Tensor]:
    """q [hk, h / hk, D], scaled, over the keys [first, last)."""
    ranges = list(pieces(first, last, tile, keys.granule))
    scores = [torch.bmm(q, _fp32(keys.read_keys(*each)).transpose(1, 2)) for each in ranges]
    weights = scores[0] if len(scores) == 1 else torch.cat(scores, -1)
    highest = weights.amax(-1, keepdim=True)
    total = weights.sub_(highest).exp_().sum(-1, keepdim=True)
    out: Tensor | None = None
    for start, stop in ranges:
        values = _fp32(keys.read_values(start, stop))
        part = weights[:, :, start - first : stop - first]
        out = torch.bmm(part, values) if out is None else out.baddbmm_(part, values)
    assert out is not None
    return out.div_(total).flatten(0, 1), total.log_().add_(highest).flatten()


def _fp32(x: Tensor) -> Tensor:
    """[n, hk, D] → [hk, n, D] fp32, a view: converting what lies together is several times faster than transposing."""
    return x.to(torch.float32).transpose(0, 1)
