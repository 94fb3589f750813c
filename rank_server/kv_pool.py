"""The KV cache of one rank: a pool of blocks, the same block ids in every layer."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from cp_layout.model_shape import KvSpec
from rank_server.compiled.slots import RowStore
from rank_server.huge_pages import host_zeros


class KvPool:
    """K and V of [num_blocks, block_size, num_kv_heads, head_dim] per layer, or, with rows = 1, one latent of that shape.

    Tokens are the outer dimensions and heads the inner ones: writing a token is one contiguous row, and blocks with adjacent
    ids are one [tokens, heads, head_dim] tensor that attention reads through strides, without a copy. Block-major inside a
    layer, so that a block is contiguous for transfer.

    memory: uint8 zeros, as many as the pool has bytes, that it is to lie in. Raises ValueError when a size is below 1 or the
    memory is not of this size.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        rows: int = 2,
        *,
        memory: Tensor | None = None,
    ) -> None:
        shape = (num_layers, rows, num_blocks, block_size, num_kv_heads, head_dim)
        if min(shape) < 1:
            raise ValueError(
                f"KV pool of {num_layers} layers, {num_blocks} blocks of {block_size} tokens, "
                f"{num_kv_heads} heads of {head_dim}: every size must be at least 1"
            )
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        # Zeros come as untouched pages from the system: memory is taken when a block is first written.
        if memory is None:
            # By name: `torch.device` is what a stand-in for a device takes over.
            size, of_host = prod(shape) * dtype.itemsize, str(device) == "cpu"
            memory = host_zeros(size) if of_host else torch.zeros(size, dtype=torch.uint8, device=device)
        elif len(memory) != prod(shape) * dtype.itemsize:
            raise ValueError(f"memory of {len(memory)} bytes for a KV pool of {prod(shape) * dtype.itemsize}")
        self._data = memory.view(dtype).view(shape)
        self._layers = [tuple(layer) for layer in self._data]
        self._stores = [RowStore(caches) for caches in self._layers] if memory.device.type == "cpu" else None

    @classmethod
    def of(
        cls,
        spec: KvSpec,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: Tensor | None = None,
    ) -> "KvPool":
        """A pool for what a rank keeps of a token."""
        return cls(num_layers, num_blocks, block_size, spec.heads, spec.width, dtype, device, spec.rows, memory=memory)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the cache."""
        return self._data.dtype

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self._data.device

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block id stands for: what all layers store."""
        return self._data.nbytes // self.num_blocks

    def as_bytes(self) -> Tensor:
        """The whole pool as uint8 [num_layers·rows, num_blocks, block_size, num_kv_heads, bytes of a head]; a view."""
        return self._data.view(torch.uint8).flatten(0, 1)

    def cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, [num_blocks, block_size, num_kv_heads, head_dim] each; views."""
        k, v = self._layers[layer]
        return k, v

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Stores k and v [T, num_kv_heads, head_dim] at slots [T] int64 (block_id·B + offset), cast to the cache's dtype.

        Tokens with slot −1 belong to another shard and are skipped. A slot beyond the pool raises IndexError.
        """
        self._write(layer, (k, v), slots)

    def latents(self, layer: int) -> Tensor:
        """Latents of a layer, [num_blocks, block_size, width]; a view."""
        return self._data[layer, 0].flatten(2)

    def write_latents(self, layer: int, latents: Tensor, slots: Tensor) -> None:
        """Stores latents [T, width] as `write` does keys."""
        self._write(layer, (latents.unsqueeze(1),), slots)

    def _write(self, layer: int, rows: tuple[Tensor, ...], slots: Tensor) -> None:
        if self._stores is not None and self._stores[layer](rows, slots):
            return
        mine = slots >= 0
        if not mine.all():
            slots, rows = slots[mine], tuple(x[mine] for x in rows)
        if slots.numel() == 0:
            return
        for cache, x in zip(self._layers[layer], rows, strict=True):
            cache.view(-1, self.num_kv_heads, self.head_dim)[slots] = x.to(cache.dtype)

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """A copy of K, then V [T, 2·num_kv_heads, head_dim] in the cache's dtype from slots [T] int64, all ≥ 0."""
        both = self._data[layer].view(-1, self.num_kv_heads, self.head_dim)
        values = self.num_blocks * self.block_size
        return both.index_select(0, torch.stack((slots, slots + values), 1).flatten()).view(
            len(slots), 2 * self.num_kv_heads, self.head_dim
        )

    def fill_nan(self, blocks: Sequence[int]) -> None:
        """Fills the blocks with NaN in every layer: a debug aid that makes any read of stale data visible."""
        self._data[:, :, list(blocks)] = torch.nan
