"""Attention on a CPU: a compiled program for rows with few queries where it suits, operations of torch for everything else."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rank_server.attention import cpu_decode
from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.attention.cpu_decode import CpuDecode
from rank_server.attention.partial import dense_partial, paged_partial


class CpuKernels:
    """`Kernels` of one rank. use_threads: see `CpuDecode`."""

    def __init__(self, use_threads: bool | None = None) -> None:
        self._decode = CpuDecode(use_threads)
        self._sorted: _Sorted | None = None

    def paged(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        if not cpu_decode.suits(q, k_cache, v_cache):
            return paged_partial(q, k_cache, v_cache, batch, scale)
        if self._sorted is None or self._sorted.batch is not batch:
            self._sorted = _Sorted.of(batch)
        if self._sorted.covered == q.shape[0]:
            out, lse = q.new_empty(q.shape, dtype=torch.float32), q.new_empty(q.shape[:2], dtype=torch.float32)
        else:
            out, lse = paged_partial(q, k_cache, v_cache, self._sorted.others, scale)
        if self._sorted.few:
            self._decode.attend(q, k_cache, v_cache, self._sorted.few, batch, scale, out, lse)
        return out, lse

    def dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        return dense_partial(q, k, v, scale, seen)

    def warm_up(self, dtype: torch.dtype, share: int, head_dim: int) -> None:
        """See `Kernels`."""
        if cpu_decode.fits(dtype, share, head_dim):
            self._decode.warm_up(share, head_dim)


@dataclass(frozen=True, slots=True)
class _Sorted:
    """A batch by what its rows are attended with; the layers of a step share it."""

    batch: AttentionBatch
    few: tuple[AttentionRow, ...]
    covered: int
    """Queries of these rows."""
    others: AttentionBatch

    @classmethod
    def of(cls, batch: AttentionBatch) -> "_Sorted":
        few = tuple(row for row in batch.rows if cpu_decode.few(row))
        others = tuple(row for row in batch.rows if not cpu_decode.few(row))
        return cls(batch, few, sum(row.q_len for row in few), replace(batch, rows=others))
