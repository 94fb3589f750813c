"""Attention over latents, absorbed or with expanded keys (see `latent`), by the kernels of grouped-query attention.

Absorbed, the latents are the keys of one KV head and, of their first dc elements, its values.
"""

from collections.abc import Callable

from torch import Tensor

from rank_server.attention.batch import AttentionBatch
from rank_server.attention.kernels import Kernels
from rank_server.attention.latent import UpProjection
from rank_server.attention.merge import OnlineMerge

KEY_TILE = 1024
"""Latents that are expanded at a time: bounds what is alive beside the cache."""

Read = Callable[[int, int], Tensor]
"""(first, last) → latents first … last − 1 of a row, [n, dc + dr]."""


def absorbed_paged(
    kernels: Kernels, q: Tensor, cache: Tensor, width: int, batch: AttentionBatch, scale: float
) -> tuple[Tensor, Tensor]:
    """Partial attention (out [T, h, dc], lse [T, h], natural log, fp32) of absorbed queries q [T, h, dc + dr] over this shard.

    cache: [num_blocks, B, dc + dr]; width: dc. A query sees the first `batch.visible` latents of its row; one that sees none
    gets exactly (0, −inf).
    """
    latents = cache.unsqueeze(2)
    return kernels.paged(q, latents, latents[..., :width], batch, scale)


def absorbed_dense(
    kernels: Kernels, q: Tensor, latents: Tensor, width: int, seen: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The same over latents [n, dc + dr] at hand; query i sees the first seen[i] of them, None: all."""
    keys = latents.unsqueeze(1)
    return kernels.dense(q, keys, keys[..., :width], scale, seen)


def expanded(
    kernels: Kernels, q: Tensor, read: Read, count: int, seen: Tensor | None, up: UpProjection, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [t, h, dv], lse [t, h]) of queries q [t, h, dn + dr] of one row over its `count` latents, expanded tile by tile.

    seen: [t] ascending, query i sees the first seen[i]; None: all.
    """
    merged = OnlineMerge((*q.shape[:2], up.shape.v_head_dim), q.device)
    last = count if seen is None else int(seen[-1]) if len(q) else 0
    for start in range(0, last, KEY_TILE):
        stop = min(start + KEY_TILE, last)
        keys, values = (x.transpose(0, 1) for x in up.expand(read(start, stop)))
        visible = None if seen is None else (seen - start).clamp_(0, stop - start)
        merged.add(*kernels.dense(q, keys, values, scale, visible))
    return merged.result()


def paged_reader(cache: Tensor, block_table: Tensor) -> Read:
    """Reads a request's latents on this shard out of cache [num_blocks, B, dc + dr]; what it gives is a copy."""
    b = cache.shape[1]
    table = block_table.to(cache.device)  # kept in host memory

    def read(first: int, last: int) -> Tensor:
        column = first // b
        blocks = cache.index_select(0, table[column : -(-last // b)]).flatten(0, 1)
        return blocks[first - column * b : last - column * b]

    return read
