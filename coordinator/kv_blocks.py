"""The KV of the requests of one scheduling set, in block ids: pools, prefix cache and block tables together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordinator.block_pool import BlockPool
from coordinator.prefix_cache import Hit, Place, PrefixCache
from coordinator.request import Request
from cp_layout.blocks import BlockHasher, reusable_tokens
from cp_layout.capacity import blocks_by_member, roomiest_offset
from cp_layout.interleave import Layout


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a waiting request would go: its shard offset, its prefix hit, and the free blocks it takes in the end."""

    shard_offset: int
    hit: Hit
    num_cached_tokens: int
    free_needed: tuple[int, ...]
    """Per member, free blocks that all known tokens need; evictable blocks of the hit count, held ones do not."""


@dataclass(slots=True)
class _Sequence:
    """Blocks of one request."""

    hasher: BlockHasher
    tables: tuple[list[int], ...] = ()
    """Per member, the request's block table; () while it holds nothing."""
    num_registered: int = 0
    """Units of the tables that have been offered to the prefix cache, or came from it."""
    is_announced: bool = False
    """Whether the ranks have the tables too."""


class KvBlocks:
    """Blocks by pool member.

    The order of use per request: open, (place, admit, grow…, register…, release)…, close. Blocks that the ranks have in their
    tables are *announced*: from `announce`, at any time after `admit`, to `retract`, at any time before `release`.
    """

    def __init__(self, layout: Layout, blocks_per_member: int, identity: bytes) -> None:
        self._layout = layout
        self._blocks_per_member = blocks_per_member
        self._identity = identity
        self._none = (0,) * layout.num_shards
        self.clear()

    def clear(self) -> None:
        """Forgets all requests, all blocks and the whole prefix cache."""
        law = BlockHasher(self._layout, self._identity, b"")
        self._unit_tokens = law.unit_tokens
        self._whole_blocks = law.units_per_virtual_block == self._layout.num_shards
        self._pools = tuple(BlockPool(self._blocks_per_member) for _ in range(self._layout.num_shards))
        self._cache = PrefixCache(law.units_per_virtual_block)
        self._sequences: dict[int, _Sequence] = {}
        self._table_blocks = [0] * self._layout.num_shards

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Free blocks of each member, evictable ones included."""
        return tuple(pool.num_free for pool in self._pools)

    @property
    def table_blocks(self) -> tuple[int, ...]:
        """Per member, entries of all announced block tables: what a rank of that member reports as in use."""
        return tuple(self._table_blocks)

    def open(self, request: Request) -> None:
        """Takes note of a request; it holds nothing yet."""
        self._sequences[request.handle] = _Sequence(BlockHasher(self._layout, self._identity, request.salt))

    def close(self, request: Request) -> None:
        """Forgets a request that holds nothing."""
        if self._sequences.pop(request.handle).tables:
            raise RuntimeError(f"request {request.handle} is forgotten while it holds blocks")

    def announce(self, request: Request) -> None:
        """The ranks get the request's tables with the next step."""
        self._set_announced(self._sequences[request.handle], True)

    def retract(self, request: Request) -> None:
        """The ranks forget the request with the next step; its blocks stay its own."""
        self._set_announced(self._sequences[request.handle], False)

    def place(self, request: Request, more: int = 0) -> Placement:
        """Prefix hit and shard offset for a request that holds nothing; changes nothing. more: tokens beyond the known ones.

        A hit decides the offset; without one it is the roomiest. Prompt tokens that are still to be scored are no hit, they
        have to be computed (F13).
        """
        length = request.num_known
        reusable = reusable_tokens(request.num_scored if request.is_unscored else length, self._layout)
        hit = self._cache.longest(self._chain(request, reusable // self._unit_tokens))
        offset = hit.shard_offset if hit.units else roomiest_offset(self._layout, length + more, self.free_blocks)
        needed = blocks_by_member(self._layout, length + more, offset)
        for member, block in (place for unit in hit.units for place in unit):
            needed[member] -= self._pools[member].is_held(block)
        return Placement(offset, hit, len(hit.units) * self._unit_tokens, tuple(needed))

    def admit(self, request: Request, placement: Placement) -> None:
        """Gives the request the blocks of its prefix hit; the placement must be of this moment."""
        sequence = self._sequences[request.handle]
        sequence.tables = tuple([] for _ in self._pools)
        for member, block in (place for unit in placement.hit.units for place in unit):
            self._pools[member].share(block)
            sequence.tables[member].append(block)
        sequence.num_registered = len(placement.hit.units)

    def missing(self, request: Request, length: int) -> Sequence[int]:
        """Per member, blocks that the request lacks for [0, length); length > `num_computed`."""
        layout, tables = self._layout, self._sequences[request.handle].tables
        if length == request.num_computed + 1:  # decode: one look instead of one per member
            member = layout.member_of(layout.owner(length - 1), request.shard_offset)
            if layout.block_column(length - 1) < len(tables[member]):
                return self._none
        needed = blocks_by_member(layout, length, request.shard_offset)
        # A request may have been given room beyond this length.
        return [max(0, need - len(table)) for need, table in zip(needed, tables, strict=True)]

    def has_room(self, counts: Sequence[int]) -> bool:
        """Whether every member has so many free blocks."""
        return counts is self._none or all(pool.num_free >= count for pool, count in zip(self._pools, counts, strict=True))

    def grow(self, request: Request, counts: Sequence[int]) -> None:
        """Appends so many blocks of each member to the request's tables; there must be room.

        Ids of one call ascend, in whatever order they were free or evicted: neighbours are then one view for the kernels.
        """
        if counts is self._none:
            return
        sequence = self._sequences[request.handle]
        for member, (table, count) in enumerate(zip(sequence.tables, counts, strict=True)):
            self._table_blocks[member] += count if sequence.is_announced else 0
            table.extend(sorted(self._take(member) for _ in range(count)))

    def _take(self, member: int) -> int:
        block, evicted = self._pools[member].take()
        if evicted:
            self._forget((member, block))
        return block

    def tail(self, request: Request, counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The last so many blocks of each table; () when all counts are 0."""
        if counts is self._none or not any(counts):
            return ()
        tables = self._sequences[request.handle].tables
        return tuple(tuple(table[len(table) - count :]) for table, count in zip(tables, counts, strict=True))

    def columns(self, request: Request, member: int, columns: range) -> tuple[int, ...]:
        """Blocks in these columns of the request's table on a member, as far as it has them."""
        return tuple(self._sequences[request.handle].tables[member][columns.start : columns.stop])

    def table_lengths(self, request: Request) -> list[int]:
        """Blocks in each of the request's tables."""
        return [len(table) for table in self._sequences[request.handle].tables]

    def register(self, request: Request, num_tokens: int) -> None:
        """Offers the units of the first `num_tokens` ≤ `num_computed` tokens that are full, and have not been offered yet, to
        the prefix cache.

        A unit that is already cached under the same offset is not cached twice: this request's copy stays its own.
        """
        sequence = self._sequences[request.handle]
        full = num_tokens // self._unit_tokens
        if full <= sequence.num_registered:
            return
        for digest in self._chain(request, full, sequence.num_registered):
            places = self._unit_places(sequence.num_registered, request.shard_offset, sequence.tables)
            if self._cache.insert(digest, request.shard_offset, places):
                for member, block in places:
                    self._pools[member].mark_cached(block)
            sequence.num_registered += 1

    def release(self, request: Request) -> None:
        """Gives all blocks back, the tables' ends first, so that a prefix outlives its continuation (F4)."""
        sequence = self._sequences[request.handle]
        if sequence.is_announced:
            raise RuntimeError(f"request {request.handle} gives blocks back that the ranks have in their tables")
        for member, table in enumerate(sequence.tables):
            for block in reversed(table):
                self._pools[member].release(block)
        sequence.tables = ()
        sequence.num_registered = 0

    def _set_announced(self, sequence: _Sequence, announced: bool) -> None:
        if sequence.is_announced == announced:
            raise RuntimeError(f"block tables are {'announced' if announced else 'retracted'} twice")
        sequence.is_announced = announced
        for member, table in enumerate(sequence.tables):
            self._table_blocks[member] += len(table) if announced else -len(table)

    def _chain(self, request: Request, stop: int, start: int = 0) -> Iterator[bytes]:
        """Digests of the units [start, stop) of the known tokens; what the request came without is computed when asked for."""
        hasher = self._sequences[request.handle].hasher
        unit, digests = self._unit_tokens, request.digests
        for index in range(start, stop):
            while len(digests) <= index:
                previous = digests[-1] if digests else hasher.root
                first = len(digests) * unit
                digests.append(hasher.extend(previous, request.known(first, first + unit)))
            yield digests[index]

    def _unit_places(self, unit: int, shard_offset: int, tables: Sequence[list[int]]) -> tuple[Place, ...]:
        """Blocks of a unit: of the one shard that owns it when blocks are whole, else of all shards."""
        layout, first = self._layout, unit * self._unit_tokens
        shards: Sequence[int] = (layout.owner(first),) if self._whole_blocks else range(layout.num_shards)
        column = layout.block_column(first)
        members = [layout.member_of(shard, shard_offset) for shard in shards]
        return tuple((member, tables[member][column]) for member in members)

    def _forget(self, place: Place) -> None:
        for member, block in self._cache.forget(place):
            self._pools[member].unmark_cached(block)
