"""Two sides of a transfer in one process: real servers and pullers over numpy pools whose values say what they are."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.reshard import Link, Side, reshard
from cp_wire.pb import kv_transfer_pb2 as pb
from cp_wire.serve import Server
from kv_transfer import framing
from kv_transfer.facts import Place, facts_of
from kv_transfer.framing import Header
from kv_transfer.generations import Generations
from kv_transfer.leases import LeaseTable
from kv_transfer.pull import Limits, Peer, Pull, Report
from kv_transfer.puller import Puller
from kv_transfer.service import SERVICE, KvTransferServicer, add_to_server
from kv_transfer.shared_memory import SharedPool
from kv_transfer.source import Source
from kv_transfer.store import ArrayStore, Bytes, Picked

PLANES = 4
HEAD_BYTES = 8
UNTOUCHED = -1
SESSION, EPOCH = 77, 3
DEADLINE_S = 30.0
TEST_LIMITS = Limits(message_bytes=256, idle_s=5, call_s=5, deadline_s=20)


class Clock:
    """Time that only tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def values(plane: int, heads: range, tokens: np.ndarray) -> np.ndarray:
    """[tokens, heads] the number that belongs to each."""
    return plane * 10**12 + np.array(heads) * 10**9 + tokens[:, None]


def encode(header: Header, payload: bytes) -> bytes:
    """The frame of a ready payload."""

    def fill(out: np.ndarray) -> None:
        out[:] = np.frombuffer(payload, np.uint8)

    return framing.encode(header, len(payload), fill)


class CountingStore(ArrayStore):
    """Knows how often each position was written since `forget`: `writes` [planes, num_blocks, block_size, heads]."""

    def __init__(self, data: Bytes, shared: SharedPool | None = None) -> None:
        super().__init__(data, shared)
        self.writes = np.zeros(data.shape[:-1], np.int64)
        self._counts = ArrayStore(self.writes.view(np.uint8).reshape(data.shape))

    def forget(self) -> None:
        self.writes[:] = 0

    def write(self, picked: Picked, rows: range, data: Bytes) -> None:
        """See `Store.write`."""
        super().write(picked, rows, data)
        counts = np.empty(len(data), np.uint8)
        self._counts.read(picked, rows, counts)
        counts.view(np.int64)[:] += 1
        self._counts.write(picked, rows, counts)


@dataclass
class Rank:
    """A rank's pool and the block table of one request at a time, with room around it."""

    place: Place
    blocks: list[int]
    pool: np.ndarray
    store: CountingStore
    generations: Generations
    facts: pb.KvFacts
    shared: SharedPool | None

    @classmethod
    def make(cls, side: Side, rank: int, length: int, *, name: str, host: str = "", seed: int = 0) -> "Rank":
        layout = side.layout
        num_blocks = layout.blocks_needed(side.shard_of(rank), length) + 3
        shape = (PLANES, num_blocks, layout.block_size, len(side.heads_of(rank)))
        shared = SharedPool(prod(shape) * HEAD_BYTES) if host else None
        data = np.empty(prod(shape) * HEAD_BYTES, np.uint8) if shared is None else shared.data
        pool = data.view(np.int64).reshape(shape)
        store = CountingStore(data.reshape(*shape, HEAD_BYTES), shared)
        # What a rank says of itself names no request, so its shard offset is 0.
        place = Place(Side(side.grid, layout, side.kv_heads), rank, f"{name}-{rank}", host)
        facts = facts_of(place, store.geometry, "model", "int64")
        made = cls(place, [], pool, store, Generations(num_blocks), facts, shared)
        made.begin(side, length, seed)
        return made

    def begin(self, side: Side, length: int, seed: int) -> None:
        """An empty pool, and blocks for another request, which is no longer than the first."""
        columns = side.layout.blocks_needed(side.shard_of(self.place.rank), length)
        ids = np.random.default_rng((seed, self.place.rank)).permutation(self.pool.shape[1])[:columns]
        self.blocks = ids.tolist()
        self.generations.stamp(self.blocks)
        self.pool[:] = UNTOUCHED
        self.store.forget()

    def wanted(self, side: Side, start: int, end: int) -> np.ndarray:
        """The pool as it should be with tokens [start, end) and nothing else."""
        pool = np.full(self.pool.shape, UNTOUCHED, np.int64)
        tokens = np.arange(start, end)
        slots = side.layout.slots(side.shard_of(self.place.rank), np.array(self.blocks, np.int64), tokens)
        for plane in range(PLANES):
            flat = pool[plane].reshape(-1, pool.shape[-1])
            mine = slots >= 0
            flat[slots[mine]] = values(plane, side.heads_of(self.place.rank), tokens)[mine]
        return pool


@dataclass
class Sides:
    """Everything a test may want to look at or to break."""

    source: Side
    target: Side
    length: int
    clock: Clock
    sources: list[Rank]
    leases: list[LeaseTable]
    servers: list[Server]
    servicers: list[KvTransferServicer]
    peers: Mapping[int, Peer]
    targets: list[Rank]
    pullers: list[Puller]
    session: int = SESSION

    def again(self, length: int) -> None:
        """Another session, of another request of at most as many tokens, on the same servers and in the same pools."""
        self.session, self.length = self.session + 1, length
        for ranks, own in ((self.sources, self.source), (self.targets, self.target)):
            for rank in ranks:
                rank.begin(own, length, seed=self.session)
        self.grant(length)

    def grant(self, tokens: int) -> None:
        """The sources hold the request and lease it, so far to its first `tokens`."""
        links = reshard(self.source, self.target, 0, self.length).links
        for rank, (own, leases) in enumerate(zip(self.sources, self.leases, strict=True)):
            own.pool[:] = own.wanted(self.source, 0, self.length)
            readers = {link.dst for link in links if link.src == rank}
            leases.grant(self.session, EPOCH, self.source.shard_offset, own.blocks, tokens, readers)

    def pull_of(self, rank: int, start: int = 0, end: int | None = None) -> Pull:
        target, end = self.targets[rank], self.length if end is None else end
        columns = self.target.layout.columns(self.target.shard_of(rank), start, end)
        return Pull(
            session=self.session,
            epoch=EPOCH,
            source=self.source,
            target=self.target,
            start=start,
            end=end,
            blocks=target.blocks[columns.start : columns.stop],
            first_column=columns.start,
            generation=target.generations.now(),
            peers=self.peers,
        )

    async def move(self, start: int = 0, end: int | None = None) -> list[Report]:
        """Every target rank pulls the range."""
        async with asyncio.timeout(DEADLINE_S):
            pulls = (puller.pull(self.pull_of(rank, start, end)) for rank, puller in enumerate(self.pullers))
            return list(await asyncio.gather(*pulls))

    async def release(self) -> None:
        """Every target rank releases where it reads."""
        links = reshard(self.source, self.target, 0, self.length).links
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(self._release(rank, links) for rank in range(len(self.pullers))))

    async def _release(self, rank: int, links: Sequence[Link]) -> None:
        peers = {link.src: self.peers[link.src] for link in links if link.dst == rank}
        await self.pullers[rank].release(replace(self.pull_of(rank), peers=peers))

    def check(self, start: int = 0, end: int | None = None) -> None:
        """Every target pool holds the range and nothing else."""
        for target in self.targets:
            wanted = target.wanted(self.target, start, self.length if end is None else end)
            np.testing.assert_array_equal(target.pool, wanted)

    def check_written_once(self) -> None:
        """What the target pools hold of the request was written once, whatever the pulls say of themselves."""
        for target in self.targets:
            np.testing.assert_array_equal(target.store.writes, target.wanted(self.target, 0, self.length) != UNTOUCHED)

    def check_untouched(self) -> None:
        assert all((target.pool == UNTOUCHED).all() for target in self.targets)


@asynccontextmanager
async def sides(
    source: Side,
    target: Side,
    length: int,
    *,
    limits: Limits | None = TEST_LIMITS,
    servicer: Callable[[Source], KvTransferServicer] = KvTransferServicer,
    ttl_s: float = 60.0,
    host: str = "",
    tokens: int | None = None,
) -> AsyncIterator[Sides]:
    """Both sides with a granted session of `length` tokens of which `tokens` (all) can be read; stopped afterwards.

    limits: None for those of a puller that is told none.
    """
    clock = Clock()
    made = Sides(source, target, length, clock, [], [], [], [], {}, [], [])
    peers = {}
    try:
        for rank in range(source.grid.world_size):
            own = Rank.make(source, rank, length, name="source", host=host, seed=1)
            leases = LeaseTable(own.generations, clock, ttl_s)
            made.sources.append(own)
            made.leases.append(leases)
            made.servicers.append(servicer(Source(own.place, own.facts, own.store, leases)))
            server = Server("127.0.0.1", 0, "data")
            server.add(add_to_server, made.servicers[-1], SERVICE)
            peers[rank] = Peer(await server.start(), own.place.instance)
            made.servers.append(server)
        made.peers = peers
        for rank in range(target.grid.world_size):
            made.targets.append(Rank.make(target, rank, length, name="target", host=host, seed=2))
            own = made.targets[-1]
            made.pullers.append(Puller(own.place, own.facts, own.store, own.generations, limits))
        made.grant(length if tokens is None else tokens)
        yield made
    finally:
        for puller in made.pullers:
            await puller.close()
        for server in made.servers:
            await server.stop(0)
        for rank in (*made.sources, *made.targets):
            if rank.shared is not None:
                rank.shared.close()


def side(n: int, interleave: int, block_size: int, *, tp: int = 1, kv_heads: int | None = 1, offset: int = 0) -> Side:
    """N shards across replicas, with d = 1."""
    return Side(Grid(tp=tp, pcp=n, dcp=n), Layout(n, interleave, block_size), kv_heads, offset)
