"""Reading a row's keys and values out of the paged cache: views where possible, bounded copies otherwise."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rank_server.attention.batch import AttentionRow


class RowKeys:
    """Keys and values of one row on this shard, local index 0 … local_len − 1.

    k_cache, v_cache: [num_blocks, B, hk, D]. Nothing beyond the range asked for is ever returned, so stale data in the rest
    of a block can't leak. workspace_bytes bounds the copies alive at a time (but a copy holds at least one block).
    """

    def __init__(self, row: AttentionRow, k_cache: Tensor, v_cache: Tensor, workspace_bytes: int) -> None:
        _, self._block_size, heads, head_dim = k_cache.shape
        self._row = row
        self._caches = (k_cache, v_cache)
        blocks = workspace_bytes // (2 * self._block_size * heads * head_dim * torch.float32.itemsize)
        self._tile = max(1, blocks) * self._block_size

    def pieces(self, first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
        """K and V of the keys [first, last) in order, in pieces of [hk, n, D] fp32."""
        views = self._row.first_block is not None and self._caches[0].dtype == torch.float32
        step = last - first if views else self._tile
        for start in range(first, last, max(step, 1)):
            k, v = (self._read(cache, start, min(start + step, last)) for cache in self._caches)
            yield k, v

    def _read(self, cache: Tensor, first: int, last: int) -> Tensor:
        b = self._block_size
        column = first // b
        if self._row.first_block is not None:
            tokens = cache.flatten(0, 1)
            base = self._row.first_block * b
        else:
            tokens = cache.index_select(0, self._row.block_table[column : -(-last // b)]).flatten(0, 1)
            base = -column * b
        return tokens[base + first : base + last].transpose(0, 1).to(torch.float32)
