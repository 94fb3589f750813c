"""Latent attention over one rank's cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cp_layout.model_shape import MlaShape
from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.attention.kernels import kernels_for
from rank_server.attention.latent import UpProjection, expanding_pays
from rank_server.attention.mla import absorbed_dense, absorbed_paged, expanded, paged_reader
from rank_server.kv_pool import KvPool


@dataclass(frozen=True, slots=True)
class _Sorted:
    """A batch by what its rows are attended with; the layers of a step share it."""

    batch: AttentionBatch
    expanded: tuple[AttentionRow, ...]
    absorbed: AttentionBatch
    """The other rows on their own."""
    places: Tensor
    """[T'] where their queries stand in the batch."""


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
        self._kernels = kernels_for(pool.device)
        self._sorted: _Sorted | None = None
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
        cache = self._pool.latents(layer)
        out, lse = absorbed_paged(self._kernels, q, cache, self._shape.kv_lora_rank, batch, self._scale)
        return (self._ups[layer].values(out).to(torch.float32) if self._project_first else out), lse

    def arrived(self, layer: int, out: Tensor) -> Tensor:
        """See `ShardAttention`."""
        return out if self._project_first else self._ups[layer].values(out)

    def local(self, layer: int, q: Tensor, batch: AttentionBatch) -> Tensor:
        """See `ShardAttention`."""
        cache, up = self._pool.latents(layer), self._ups[layer]
        if self._sorted is None or self._sorted.batch is not batch:
            self._sorted = self._sort(batch, q.device)
        rest = self._sorted.absorbed
        out = q.new_empty((*q.shape[:2], self._shape.v_head_dim))
        for row in self._sorted.expanded:
            rows = slice(row.q_start, row.q_start + row.q_len)
            read = paged_reader(cache, row.block_table)
            out[rows] = expanded(self._kernels, q[rows], read, row.local_len, batch.visible[rows], up, self._scale)[0]
        if rest.rows:
            leaving = up.absorb(q[self._sorted.places])
            partial, _ = absorbed_paged(self._kernels, leaving, cache, self._shape.kv_lora_rank, rest, self._scale)
            out[self._sorted.places] = up.values(partial).to(q.dtype)
        return out

    def dense(self, layer: int, q: Tensor, kv: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `ShardAttention`."""
        latents, up = kv[:, 0], self._ups[layer]
        if expanding_pays(self._shape, len(q)):
            return expanded(self._kernels, q, lambda first, last: latents[first:last], len(latents), seen, up, self._scale)
        out, lse = absorbed_dense(self._kernels, up.absorb(q), latents, self._shape.kv_lora_rank, seen, self._scale)
        return up.values(out).to(torch.float32), lse

    def _sort(self, batch: AttentionBatch, device: torch.device) -> _Sorted:
        long: list[AttentionRow] = []
        rest: list[AttentionRow] = []
        places: list[int] = []
        for row in batch.rows:
            if expanding_pays(self._shape, row.q_len):
                long.append(row)
            else:
                rest.append(replace(row, q_start=len(places)))
                places.extend(range(row.q_start, row.q_start + row.q_len))
        at = torch.tensor(places, dtype=torch.int64, device=device)
        return _Sorted(batch, tuple(long), AttentionBatch(tuple(rest), batch.slots[at], batch.visible[at]), at)
