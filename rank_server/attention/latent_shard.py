"""Latent attention over one rank's cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_layout.model_shape import MlaShape
from rank_server.attention.batch import AttentionBatch
from rank_server.attention.latent import UpProjection, expanding_pays
from rank_server.attention.mla import Read, absorbed, expanded, latent_partial, paged_reader
from rank_server.kv_pool import KvPool


class LatentShard:
    """`ShardAttention` of latent attention: a KV row is one latent [1, dc + dr], queries travel absorbed.

    ups: of each layer, for this rank's heads; one_set_of_heads: whether all members of the DCP group have the same heads. Then
    what returns is projected to values before it travels, if they are narrower than latents.
    """

    def __init__(
        self, pool: KvPool, shape: MlaShape, scale: float, ups: Sequence[UpProjection], one_set_of_heads: bool
    ) -> None:
        self._pool = pool
        self._shape = shape
        self._scale = scale
        self._ups = ups
        self._project_first = one_set_of_heads and shape.v_head_dim < shape.kv_lora_rank
        self.kv_dtype = pool.dtype

    @property
    def row_bytes(self) -> int:
        """See `ShardAttention`."""
        return self._shape.latent_dim * self.kv_dtype.itemsize

    def write(self, layer: int, kv: Tensor, slots: Tensor) -> None:
        """See `ShardAttention`."""
        self._pool.write_latents(layer, kv[:, 0], slots)

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """See `ShardAttention`."""
        return self._pool.latents(layer).flatten(0, 1).index_select(0, slots).unsqueeze(1)

    def leaving(self, layer: int, q: Tensor) -> Tensor:
        """See `ShardAttention`."""
        return self._ups[layer].absorb(q)

    def paged(self, layer: int, q: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        """See `ShardAttention`."""
        out, lse = latent_partial(q, self._pool.latents(layer), self._shape.kv_lora_rank, batch, self._scale)
        return (self._ups[layer].values(out).to(torch.float32) if self._project_first else out), lse

    def arrived(self, layer: int, out: Tensor) -> Tensor:
        """See `ShardAttention`."""
        return out if self._project_first else self._ups[layer].values(out)

    def local(self, layer: int, q: Tensor, batch: AttentionBatch) -> Tensor:
        """See `ShardAttention`."""
        cache = self._pool.latents(layer)
        out = q.new_empty((*q.shape[:2], self._shape.v_head_dim))
        for row in batch.rows:
            rows = slice(row.q_start, row.q_start + row.q_len)
            read = paged_reader(cache, row.block_table)
            out[rows] = self._attend(layer, q[rows], read, row.local_len, batch.visible[rows])[0]
        return out

    def dense(self, layer: int, q: Tensor, kv: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `ShardAttention`."""
        latents = kv[:, 0]
        return self._attend(layer, q, lambda first, last: latents[first:last], len(latents), seen)

    def _attend(self, layer: int, q: Tensor, read: Read, count: int, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        up = self._ups[layer]
        if expanding_pays(self._shape, len(q)):
            return expanded(q, read, count, visible, up, self._scale)
        out, lse = absorbed(up.absorb(q), read, count, visible, self._shape.kv_lora_rank, self._scale)
        return up.values(out).to(torch.float32), lse
