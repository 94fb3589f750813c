"""Attention on a GPU: a Triton kernel for decode rows where Triton is installed, operations of torch for everything else."""

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.attention.paged_rows import PagedRows
from rank_server.attention.portable import check_heads, dense_portable, nothing_seen, paged_row

LARGEST_HEAD_DIM = 128
LARGEST_SHARE = 32
"""Bounds of the kernel: beyond them its tiles outgrow the shared memory of some GPUs, and torch's operations take over."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a step's layers share: block tables are copied to the device once."""

    batch: AttentionBatch
    decode: PagedRows
    others: tuple[tuple[AttentionRow, Tensor], ...]
    """Rows for torch, each with its table on the device; rows without keys are left out."""


class GpuKernels:
    """`Kernels` of one rank. processors: multiprocessors of the device; use_triton: None = where it is installed."""

    def __init__(self, processors: int, use_triton: bool | None = None) -> None:
        self._processors = processors
        self._use_triton = importlib.util.find_spec("triton") is not None if use_triton is None else use_triton
        self._prepared: _Prepared | None = None

    def paged(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        kv_heads = k_cache.shape[2]
        check_heads(q.shape[1], kv_heads)
        if self._prepared is None or self._prepared.batch is not batch:
            same_width = k_cache.shape == v_cache.shape
            fits = same_width and q.shape[2] <= LARGEST_HEAD_DIM and q.shape[1] // kv_heads <= LARGEST_SHARE
            self._prepared = self._prepare(batch, q.device, self._use_triton and fits)
        out, lse = nothing_seen(q, v_cache.shape[-1])
        decode = self._prepared.decode
        if decode.longest > 0:
            from rank_server.attention.triton_decode import paged_decode, splits_for

            splits = splits_for(len(decode.lens) * kv_heads, decode.longest, self._processors)
            out[decode.tokens], lse[decode.tokens] = paged_decode(q[decode.tokens], k_cache, v_cache, decode, scale, splits)
        for row, table in self._prepared.others:
            tokens = slice(row.q_start, row.q_start + row.q_len)
            out[tokens], lse[tokens] = paged_row(q[tokens], k_cache, v_cache, row, table, batch.visible[tokens], scale)
        return out, lse

    def dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        return dense_portable(q, k, v, scale, seen)

    def warm_up(self, dtype: torch.dtype, share: int, key_dim: int, value_dim: int) -> None:
        """See `Kernels`; Triton compiles at the first call."""

    def _prepare(self, batch: AttentionBatch, device: torch.device, use_triton: bool) -> _Prepared:
        decode = [row for row in batch.rows if row.q_len == 1] if use_triton else []
        others = [row for row in batch.rows if row.local_len > 0 and not (use_triton and row.q_len == 1)]
        return _Prepared(batch, PagedRows.of(decode, device), tuple((row, row.block_table.to(device)) for row in others))
