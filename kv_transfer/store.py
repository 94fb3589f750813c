"""A rank's paged KV pool, seen as rows of bytes.

A *plane* is K, V or the latent cache of one layer: [num_blocks, block_size, heads, head_bytes]. A *place* counts the rows of
all planes, one plane after another: plane · num_blocks · block_size + slot.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kv_transfer.shared_memory import SharedPool

Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a pool; ValueError when one is below 1."""

    planes: int
    num_blocks: int
    block_size: int
    heads: int
    head_bytes: int

    def __post_init__(self) -> None:
        if min(self.planes, self.num_blocks, self.block_size, self.heads, self.head_bytes) < 1:
            raise ValueError(f"{self}: every size must be at least 1")

    @property
    def slots(self) -> int:
        """Token slots of one plane."""
        return self.num_blocks * self.block_size

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[planes, num_blocks, block_size, heads, head_bytes] of the whole pool."""
        return self.planes, self.num_blocks, self.block_size, self.heads, self.head_bytes

    def check(self, places: Int64s, first_head: int, num_heads: int) -> None:
        """IndexError for what the pool does not have."""
        if not 0 <= first_head < first_head + num_heads <= self.heads:
            raise IndexError(f"heads [{first_head}, {first_head + num_heads}) of a pool of {self.heads}")
        if len(places) and not 0 <= places.min() <= places.max() < self.planes * self.slots:
            raise IndexError(f"places {places.min()} to {places.max()} of a pool of {self.planes * self.slots}")


class Store(Protocol):
    """What a transfer needs of a pool. Both calls take places [n] and heads [first, first + num) of the rank; IndexError for
    what the pool does not have. Neither returns before the bytes are where they belong."""

    @property
    def geometry(self) -> Geometry:
        """Sizes of the pool."""
        ...

    @property
    def shared(self) -> SharedPool | None:
        """The memory of the whole pool, [planes, …] as `Geometry.shape` says, if processes of this host may read it."""
        ...

    def read(self, places: Int64s, first_head: int, num_heads: int, out: Bytes) -> None:
        """Copies the rows to `out` [n, num_heads·head_bytes], contiguous."""
        ...

    def write(self, places: Int64s, first_head: int, num_heads: int, rows: Bytes) -> None:
        """Copies rows [n, num_heads·head_bytes] to the places, each of which occurs once."""
        ...


class ArrayStore:
    """A pool in memory: a C-contiguous uint8 array of `geometry.shape`, shared with its owner. shared: where `data` lies, if
    others may read it there."""

    def __init__(self, data: Bytes, shared: SharedPool | None = None) -> None:
        if data.dtype != np.uint8 or data.ndim != 5 or not data.flags.c_contiguous:
            raise ValueError("a pool is a contiguous uint8 array [planes, num_blocks, block_size, heads, head_bytes]")
        self._geometry = Geometry(*data.shape)
        self._data = data.reshape(-1)
        self._shared = shared

    @property
    def shared(self) -> SharedPool | None:
        """See `Store.shared`."""
        return self._shared

    @property
    def geometry(self) -> Geometry:
        """Sizes of the pool."""
        return self._geometry

    def read(self, places: Int64s, first_head: int, num_heads: int, out: Bytes) -> None:
        """See `Store.read`."""
        units, index = self._units(places, first_head, num_heads)
        np.take(units, index, axis=0, out=out.reshape(len(index), units.shape[1]), mode="clip")

    def write(self, places: Int64s, first_head: int, num_heads: int, rows: Bytes) -> None:
        """See `Store.write`."""
        units, index = self._units(places, first_head, num_heads)
        units[index] = rows.reshape(len(index), units.shape[1])

    def _units(self, places: Int64s, first_head: int, num_heads: int) -> tuple[Bytes, Int64s]:
        """The pool as units of equal size, and the units that were asked for, in order.

        Of all heads a unit is as many neighbouring rows as divide the request evenly, of some heads as many heads.
        """
        geometry = self._geometry
        # `take` clips: a place beyond the pool has to be found before.
        geometry.check(places, first_head, num_heads)
        if num_heads == geometry.heads:
            rows = _granule(places, geometry.block_size)
            return self._data.reshape(-1, rows * num_heads * geometry.head_bytes), places[::rows] // rows
        aligned = geometry.heads % num_heads == 0 and first_head % num_heads == 0
        width = num_heads if aligned else 1
        index = places * (geometry.heads // width) + first_head // width
        if not aligned:
            index = (index[:, None] + np.arange(num_heads)).reshape(-1)
        return self._data.reshape(-1, width * geometry.head_bytes), index


def _granule(places: Int64s, block_size: int) -> int:
    """The largest divisor of B into whose multiples the places fall: where stretches of neighbours begin and end, in the list
    and in the pool."""
    begins = np.append(0, np.flatnonzero(np.diff(places) != 1) + 1)
    if not len(places):
        return 1
    return int(np.gcd.reduce(np.concatenate([begins, places[begins], [len(places), block_size]])))
