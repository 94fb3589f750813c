"""A rank's paged KV pool, seen as rows of bytes.

A *plane* is K, V or the latent cache of one layer: [num_blocks, block_size, heads, head_bytes]. A *row* is one token of one
plane, the bytes of the heads that are meant.
"""

from dataclasses import dataclass
from math import gcd
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cp_layout.packing import PlaneIndex
from kv_transfer.shared_memory import SharedPool

Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]

DIRECT_BYTES = 16 << 10
"""Units of this size are copied from pool to pool one by one; smaller ones cost less by way of a buffer, many at a time."""

WRITTEN_BYTES = 2 << 10
"""Larger units are written in parts of it, if it divides them: some C libraries copy more at once by an instruction that takes
twice as long where the source, as what lies in a message, is at an odd address."""


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

    def check(self, slots: Int64s, first_head: int, num_heads: int) -> None:
        """IndexError for what the pool does not have."""
        if not 0 <= first_head < first_head + num_heads <= self.heads:
            raise IndexError(f"heads [{first_head}, {first_head + num_heads}) of a pool of {self.heads}")
        if not len(slots):
            raise IndexError("no slots at all")
        if not 0 <= slots.min() <= slots.max() < self.slots:
            raise IndexError(f"slots {slots.min()} to {slots.max()} of a pool of {self.slots}")


@dataclass(frozen=True, slots=True, eq=False)
class Picked:
    """Rows of a pool that move together: some heads of some tokens, in all planes. They stand plane by plane, in each plane
    token by token.

    They are taken as units of `unit_bytes`, that is, as many neighbouring rows of all heads as divide the request evenly, or as
    many heads of one row: the pool is an array of such units, and `index` says which are meant, in order.
    """

    unit_bytes: int
    index: PlaneIndex
    row_bytes: int
    num_rows: int

    def units(self, rows: range, size: int | None = None) -> Int64s:
        """Units of a piece of the rows; IndexError when it is cut across one or ends beyond the last row.

        size: of smaller units that are meant instead; divides `unit_bytes`.
        """
        start, stop = rows.start * self.row_bytes, rows.stop * self.row_bytes
        if not 0 <= rows.start <= rows.stop <= self.num_rows or start % self.unit_bytes or stop % self.unit_bytes:
            raise IndexError(f"rows [{rows.start}, {rows.stop}) of {self.num_rows}")
        units = self.index.at(start // self.unit_bytes, stop // self.unit_bytes)
        if size is None or size == self.unit_bytes:
            return units
        parts = self.unit_bytes // size
        return (units[:, None] * parts + np.arange(parts)).reshape(-1)


def pick(geometry: Geometry, slots: Int64s, first_head: int, num_heads: int, piece: int = 1) -> Picked:
    """Heads [first, first + num) of the tokens at these slots [n], in every plane; IndexError for what the pool does not have.

    piece: rows are asked for from multiples of it to multiples of it, or to the last.
    """
    geometry.check(slots, first_head, num_heads)
    heads, width = geometry.heads, 1
    if num_heads == heads:
        rows = _granule(slots, gcd(geometry.block_size, piece))
        width, index = rows * heads, slots[::rows] // rows
    elif heads % num_heads == 0 and first_head % num_heads == 0:
        width, index = num_heads, slots * (heads // num_heads) + first_head // num_heads
    else:
        index = (slots[:, None] * heads + np.arange(first_head, first_head + num_heads)).reshape(-1)
    return Picked(
        unit_bytes=width * geometry.head_bytes,
        index=PlaneIndex(index, geometry.slots * heads // width),
        row_bytes=num_heads * geometry.head_bytes,
        num_rows=geometry.planes * len(slots),
    )


def _granule(slots: Int64s, limit: int) -> int:
    """The largest divisor of `limit` into whose multiples the slots fall: where stretches of neighbours begin and end, in the
    list and in the pool."""
    begins = np.append(0, np.flatnonzero(np.diff(slots) != 1) + 1)
    return int(np.gcd.reduce(np.concatenate([begins, slots[begins], [len(slots), limit]])))


class Store(Protocol):
    """What a transfer needs of a pool. Both calls take a piece of what was picked of this pool's geometry; neither returns
    before the bytes are where they belong."""

    @property
    def geometry(self) -> Geometry:
        """Sizes of the pool."""
        ...

    @property
    def shared(self) -> SharedPool | None:
        """The memory of the whole pool, [planes, …] as `Geometry.shape` says, if processes of this host may read it."""
        ...

    def read(self, picked: Picked, rows: range, out: Bytes) -> None:
        """Copies the rows to `out` [bytes of the rows], contiguous."""
        ...

    def write(self, picked: Picked, rows: range, data: Bytes) -> None:
        """Copies `data` [bytes of the rows] to the rows. No slot was picked twice."""
        ...

    def copy(self, picked: Picked, rows: range, source: "ArrayStore", theirs: Picked) -> None:
        """Copies the same piece of `theirs`, of another pool in memory that this process can read, to the rows."""
        ...


def copy_by_buffer(target: Store, picked: Picked, rows: range, source: Store, theirs: Picked) -> None:
    """What `Store.copy` does, in two steps."""
    data = np.empty(len(rows) * picked.row_bytes, np.uint8)
    source.read(theirs, rows, data)
    target.write(picked, rows, data)


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

    def read(self, picked: Picked, rows: range, out: Bytes) -> None:
        """See `Store.read`."""
        index = picked.units(rows)
        # `clip` spares a second look at an index that `pick` has looked at.
        self._units(picked.unit_bytes).take(index, axis=0, out=out.reshape(len(index), picked.unit_bytes), mode="clip")

    def write(self, picked: Picked, rows: range, data: Bytes) -> None:
        """See `Store.write`."""
        size = gcd(picked.unit_bytes, WRITTEN_BYTES)
        if size < WRITTEN_BYTES:
            size = picked.unit_bytes
        index = picked.units(rows, size)
        self._units(size)[index] = data.reshape(len(index), size)

    def copy(self, picked: Picked, rows: range, source: "ArrayStore", theirs: Picked) -> None:
        """See `Store.copy`."""
        size = gcd(picked.unit_bytes, theirs.unit_bytes)
        if size < DIRECT_BYTES:
            copy_by_buffer(self, picked, rows, source, theirs)
            return
        ours, others = self._units(size), source._units(size)
        for to, at in zip(picked.units(rows, size).tolist(), theirs.units(rows, size).tolist(), strict=True):
            ours[to] = others[at]

    def _units(self, size: int) -> Bytes:
        return self._data.reshape(-1, size)
