"""Device type → the functions that compute partial attention there."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from rank_server.attention.batch import AttentionBatch
from rank_server.attention.cpu import CpuKernels
from rank_server.attention.gpu import GpuKernels


class Kernels(Protocol):
    """Partial attention (out [T, h, E] fp32, lse [T, h] fp32, natural log) with values of width E; (0, −inf) without keys."""

    def paged(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float) -> tuple[Tensor, Tensor]:
        """q [T, h, D] over the keys of this shard: see `partial.paged_partial`."""
        ...

    def dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """q [T, h, D] over keys outside the cache: see `partial.dense_partial`."""
        ...

    def warm_up(self, dtype: torch.dtype, share: int, key_dim: int, value_dim: int) -> None:
        """Compiles what is needed for such heads, `share` query heads to a KV head; else it is done when needed."""
        ...


def _cpu_kernels(device: torch.device) -> Kernels:
    return CpuKernels()


def _gpu_kernels(device: torch.device) -> Kernels:
    return GpuKernels(torch.cuda.get_device_properties(device).multi_processor_count)


KERNELS: Mapping[str, Callable[[torch.device], Kernels]] = {"cpu": _cpu_kernels, "cuda": _gpu_kernels}


def kernels_for(device: torch.device) -> Kernels:
    """The kernels of a device; one object per rank, which may remember the step that it was last asked about."""
    return KERNELS[device.type](device)
