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

    def leaving(self, layer: int, q: Tensor) -> Tensor:
        """This rank's queries [T, h, dq] as other ranks can attend with them: [T, h, D]."""
        ...

    def paged(self, layer: int, q: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        """Partial attention (out [T, h, E], lse [T, h], fp32) of q [T, h, D], as it left, over this rank's keys of the rows."""
        ...

    def arrived(self, layer: int, out: Tensor) -> Tensor:
        """The output [T, h, dv] of this rank's heads from merged partials [T, h, E]."""
        ...

    def local(self, layer: int, q: Tensor, batch: AttentionBatch) -> Tensor:
        """Output [T, h, dv] of this rank's queries [T, h, dq], all keys of which are in this rank's cache."""
        ...

    def dense(self, layer: int, q: Tensor, kv: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        """Partial attention (out [t, h, dv], lse [t, h], fp32) of this rank's queries [t, h, dq] over kv [n, s, D], which need
        not be in the cache; query i over the first seen[i] of them, ascending (None: all)."""
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
        return self._pool.read(layer, slots)

    def leaving(self, layer: int, q: Tensor) -> Tensor:
        """See `ShardAttention`."""
        return q

    def paged(self, layer: int, q: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        """See `ShardAttention`."""
        return self._kernels.paged(q, *self._pool.cache(layer), batch, self._scale)

    def arrived(self, layer: int, out: Tensor) -> Tensor:
        """See `ShardAttention`."""
        return out

    def local(self, layer: int, q: Tensor, batch: AttentionBatch) -> Tensor:
        """See `ShardAttention`."""
        return self.paged(layer, q, batch)[0]

    def dense(self, layer: int, q: Tensor, kv: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `ShardAttention`."""
        return self._kernels.dense(q, kv[:, : self._heads], kv[:, self._heads :], self._scale, seen)
