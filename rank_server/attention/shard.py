"""What the exchange of rows needs to know of one kind of attention over this rank's keys."""

from typing import Protocol

import torch
from torch import Tensor

from rank_server.attention.batch import AttentionBatch
from rank_server.attention.kernels import kernels_for
from rank_server.kv_pool import KvPool


class ShardAttention(Protocol):
    """Attention over one rank's cache. A token's KV row is [s, D]: s vectors as wide as those of a query."""

    kv_dtype: torch.dtype
    """Of the cache: what a key is rounded to before anybody reads it."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer of the cache."""
        ...

    def write(self, layer: int, kv: Tensor, slots: Tensor) -> None:
        """Stores kv [T, s, D] at slots [T]; −1 is skipped."""
        ...

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """[T, s, D] in `kv_dtype` from slots [T], all ≥ 0."""
        ...

    def paged(self, layer: int, q: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        """Partial attention (out [T, h, E], lse [T, h], fp32) of q [T, h, D] over this rank's keys of the batch's rows."""
        ...

    def dense(self, q: Tensor, kv: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        """Partial attention of q [t, h, D] over kv [n, s, D], query i over the first seen[i] of them (None: all)."""
        ...


class GqaShard:
    """`ShardAttention` of grouped-query attention: a KV row is the K heads, then the V heads of this rank."""

    def __init__(self, pool: KvPool, scale: float) -> None:
        self._pool = pool
        self._kernels = kernels_for(pool.device)
        self._scale = scale
        self._heads = pool.num_kv_heads
        self.kv_dtype = pool.dtype

    @property
    def row_bytes(self) -> int:
        """See `ShardAttention`."""
        return 2 * self._heads * self._pool.head_dim * self.kv_dtype.itemsize

    def write(self, layer: int, kv: Tensor, slots: Tensor) -> None:
        """See `ShardAttention`."""
        self._pool.write(layer, kv[:, : self._heads], kv[:, self._heads :], slots)

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """See `ShardAttention`."""
        return torch.cat(self._pool.read(layer, slots), dim=1)

    def paged(self, layer: int, q: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        """See `ShardAttention`."""
        return self._kernels.paged(q, *self._pool.cache(layer), batch, self._scale)

    def dense(self, q: Tensor, kv: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `ShardAttention`."""
        return self._kernels.dense(q, kv[:, : self._heads], kv[:, self._heads :], self._scale, seen)
