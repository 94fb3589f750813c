"""Where attention takes keys and values from: a row's blocks of the paged cache, or tensors at hand."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rank_server.attention.batch import AttentionRow


class Keys(Protocol):
    """Keys and values of one row, numbered from 0."""

    @property
    def granule(self) -> int:
        """Pieces that start at multiples of it are read best."""
        ...

    def read_keys(self, first: int, last: int) -> Tensor:
        """[last − first, hk, D] in the dtype they are stored in; a view where possible."""
        ...

    def read_values(self, first: int, last: int) -> Tensor:
        """As `read_keys`."""
        ...


def pieces(first: int, last: int, size: int, granule: int) -> Iterator[tuple[int, int]]:
    """[first, last) cut into ranges of at most max(size, granule), each but the first starting at a multiple of the granule."""
    step = max(size // granule, 1) * granule
    while first < last:
        stop = min(first // granule * granule + step, last)
        yield first, stop
        first = stop


@dataclass(frozen=True, slots=True)
class DenseKeys:
    """k, v: [n, hk, D], any strides."""

    k: Tensor
    v: Tensor
    granule: int = 1

    def read_keys(self, first: int, last: int) -> Tensor:
        """See `Keys`."""
        return self.k[first:last]

    def read_values(self, first: int, last: int) -> Tensor:
        """See `Keys`."""
        return self.v[first:last]


class RowKeys:
    """Keys and values of one row on this shard, local index 0 … local_len − 1.

    k_cache, v_cache: [num_blocks, B, hk, D]. Nothing beyond the range asked for is ever returned, so stale data in the rest
    of a block can't leak. A range inside a run of consecutive blocks is a view, any other a copy.
    """

    def __init__(self, row: AttentionRow, k_cache: Tensor, v_cache: Tensor) -> None:
        self.granule = k_cache.shape[1]
        self._row = row
        self._k_cache, self._v_cache = k_cache, v_cache

    def read_keys(self, first: int, last: int) -> Tensor:
        """See `Keys`."""
        return self._read(self._k_cache, first, last)

    def read_values(self, first: int, last: int) -> Tensor:
        """See `Keys`."""
        return self._read(self._v_cache, first, last)

    def _read(self, cache: Tensor, first: int, last: int) -> Tensor:
        row, b = self._row, self.granule
        runs = row.runs
        column, end = first // b, -(-last // b)
        run = bisect_right(runs.columns, column)
        if run == len(runs.columns) or runs.columns[run] >= end:
            start = (runs.blocks[run - 1] - runs.columns[run - 1]) * b + first
            return cache.view(-1, *cache.shape[2:])[start : start + last - first]
        copied = cache.index_select(0, row.block_table[column:end]).flatten(0, 1)
        return copied[first - column * b : last - column * b]
