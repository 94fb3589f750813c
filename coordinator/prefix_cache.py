"""Which cached blocks hold which prefix: an index from unit digests to the blocks that hold the unit.

A unit is what one digest names (`cp_layout.blocks`): one block on one member when blocks are whole (I = B or N = 1), one
block on each of the N members otherwise. The index says nothing about who holds a block; that is the pools' business.
"""

from collections.abc import Iterable
from dataclasses import dataclass

Place = tuple[int, int]
"""(pool member, block id)."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest usable cached prefix: its units in order, all laid out with one shard offset."""

    shard_offset: int
    units: tuple[tuple[Place, ...], ...]


NO_HIT = Hit(0, ())


class PrefixCache:
    """Units by (digest, shard offset): the same prefix may be cached under several offsets, and a request uses one of them.

    A unit is valid only while all its blocks are (F5); units behind a missing one stay indexed but cannot be reached (F4).
    """

    def __init__(self, units_per_virtual_block: int) -> None:
        self._units_per_virtual_block = units_per_virtual_block
        self._units: dict[bytes, dict[int, tuple[Place, ...]]] = {}
        self._keys: dict[Place, tuple[bytes, int]] = {}

    def __len__(self) -> int:
        """Units in the index."""
        return sum(len(copies) for copies in self._units.values())

    def insert(self, digest: bytes, shard_offset: int, places: tuple[Place, ...]) -> bool:
        """Names the blocks of a unit; False, and no change, when the unit is already cached under this offset."""
        copies = self._units.setdefault(digest, {})
        if shard_offset in copies:
            return False
        copies[shard_offset] = places
        for place in places:
            self._keys[place] = (digest, shard_offset)
        return True

    def forget(self, place: Place) -> tuple[Place, ...]:
        """Drops the unit that the block belongs to; returns the unit's other blocks, which are not cached any more either.

        `KeyError` for a block that no unit names.
        """
        digest, shard_offset = self._keys[place]
        copies = self._units[digest]
        places = copies.pop(shard_offset)
        if not copies:
            del self._units[digest]
        for each in places:
            del self._keys[each]
        return tuple(each for each in places if each != place)

    def longest(self, chain: Iterable[bytes]) -> Hit:
        """Longest prefix of the chain that is cached under one shard offset, in whole virtual blocks; ties: lowest offset.

        Consumes the chain up to the first unit that is missing, so a lazy chain is hashed no further than it is cached.
        """
        found: list[dict[int, tuple[Place, ...]]] = []
        offsets: set[int] = set()
        best_offset, best_units = 0, 0
        for digest in chain:
            copies = self._units.get(digest)
            if copies is None:
                break
            offsets = offsets & copies.keys() if found else set(copies)
            if not offsets:
                break
            found.append(copies)
            if len(found) % self._units_per_virtual_block == 0:
                best_offset, best_units = min(offsets), len(found)
        if best_units == 0:
            return NO_HIT
        return Hit(best_offset, tuple(copies[best_offset] for copies in found[:best_units]))
