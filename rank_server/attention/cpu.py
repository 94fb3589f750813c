"""Attention on a CPU: compiled programs for rows with few and with many queries, torch's operations where they do not suit."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rank_server.attention import cpu_decode, cpu_prefill, merge_program, move_program
from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.attention.cpu_decode import CpuDecode
from rank_server.attention.cpu_prefill import CpuPrefill
from rank_server.attention.partial import dense_partial, paged_partial
from rank_server.attention.portable import nothing_seen


class CpuKernels:
    """`Kernels` of one rank. use_threads: see `Team.of`."""

    def __init__(self, use_threads: bool | None = None) -> None:
        self._decode = CpuDecode(use_threads)
        self._prefill = CpuPrefill(use_threads)
        self._sorted: _Sorted | None = None

    def paged(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        by = self._sorted
        if by is None or not by.serves(batch, q, k_cache, v_cache):
            by = self._sorted = _Sorted.of(batch, q, k_cache, v_cache)
        if by.covered == q.shape[0]:
            out = q.new_empty((*q.shape[:2], v_cache.shape[-1]), dtype=torch.float32)
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        elif by.others.rows:
            out, lse = paged_partial(q, k_cache, v_cache, by.others, scale)
        else:
            # Queries of no row: what replicas that exchange rows are padded with.
            out, lse = nothing_seen(q, v_cache.shape[-1])
        if by.few:
            self._decode.attend(q, k_cache, v_cache, by.few, batch, scale, out, lse)
        if by.many:
            self._prefill.attend_paged(q, k_cache, v_cache, by.many, batch, scale, out, lse)
        return out, lse

    def dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        if len(q) > 0 and len(k) > 0 and cpu_prefill.suits(q, k, v):
            return self._prefill.attend_dense(q, k, v, scale, seen)
        return dense_partial(q, k, v, scale, seen)

    def warm_up(self, dtype: torch.dtype, share: int, key_dim: int, value_dim: int) -> None:
        """See `Kernels`."""
        merge_program.program()
        move_program.warm_up()
        if key_dim == value_dim and cpu_decode.fits(dtype, share, key_dim):
            self._decode.warm_up(share, key_dim)
        if cpu_prefill.fits(dtype, key_dim, value_dim):
            self._prefill.warm_up(share, key_dim, value_dim)


@dataclass(frozen=True, slots=True)
class _Sorted:
    """A batch by what its rows are attended with; the layers of a step share it."""

    batch: AttentionBatch
    few: tuple[AttentionRow, ...]
    many: tuple[AttentionRow, ...]
    covered: int
    """Queries of these rows."""
    others: AttentionBatch

    def serves(self, batch: AttentionBatch, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
        """Whether the same programs can attend these queries of the same batch."""
        return (
            self.batch is batch
            and (not self.few or cpu_decode.suits(q, k_cache, v_cache))
            and (not self.many or cpu_prefill.suits(q, k_cache, v_cache))
        )

    @classmethod
    def of(cls, batch: AttentionBatch, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> "_Sorted":
        programs = cpu_decode.suits(q, k_cache, v_cache), cpu_prefill.suits(q, k_cache, v_cache)
        few: list[AttentionRow] = []
        many: list[AttentionRow] = []
        others: list[AttentionRow] = []
        for row in batch.rows:
            (few if programs[0] and cpu_decode.few(row) else many if programs[1] else others).append(row)
        covered = sum(row.q_len for row in few + many)
        return cls(batch, tuple(few), tuple(many), covered, replace(batch, rows=tuple(others)))
