"""Really moves what `benchmarks.pd_waste` counts: source ranks and their target in this process, `KvTransfer` over loopback."""

import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import NamedTuple

import grpc.aio
import numpy as np

from benchmarks.transfer_ends import HOST, INSTANCE, LEASE_S, Bytes, pattern
from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.reshard import Side
from cp_wire.errors import Internal
from cp_wire.serve import Server
from cp_wire.words import counted
from kv_transfer.facts import Place, facts_of
from kv_transfer.generations import Generations
from kv_transfer.leases import LeaseTable
from kv_transfer.pull import Limits, Peer, Pull, TransferFailed
from kv_transfer.puller import Puller
from kv_transfer.service import SERVICE, KvTransferServicer, add_to_server
from kv_transfer.source import Source
from kv_transfer.store import ArrayStore

WAIT_S = 30.0
"""For a message or an answer: nothing is to be sent again because the machine is busy."""
UNTOUCHED = 255
"""No byte of `pattern`."""


class Traffic(NamedTuple):
    """Of one transfer: bytes of KV, messages, and bytes of these as they leave the source, serialised with their framing."""

    bytes: int
    messages: int
    wire_bytes: int

    def __str__(self) -> str:
        payload, messages = counted(self.bytes, "byte"), counted(self.messages, "message")
        return f"{payload} in {messages}, {counted(self.wire_bytes, 'byte')} on the wire"


class Weighing(KvTransferServicer):
    """Knows what its messages weigh."""

    sent_bytes = 0

    async def send(self, frame: bytes, context: grpc.aio.ServicerContext) -> None:
        """See `KvTransferServicer.send`."""
        self.sent_bytes += len(frame)
        await super().send(frame, context)


def target_of(layout: Layout) -> Layout:
    """One decode shard with blocks of the same size."""
    return Layout(1, layout.block_size, layout.block_size)


def side_of(layout: Layout) -> Side:
    """A rank for each shard; rows are not cut by heads."""
    return Side(Grid(pcp=layout.num_shards, dcp=layout.num_shards), layout, 1)


def store_of(args: Namespace, blocks: int, block_size: int) -> tuple[ArrayStore, Bytes]:
    """An untouched pool, and the same as rows [planes, slots, bytes]."""
    data = np.full((args.planes, blocks, block_size, 1, args.bytes_per_token // args.planes), UNTOUCHED, np.uint8)
    return ArrayStore(data), data.reshape(args.planes, blocks * block_size, -1)


def source_of(args: Namespace, side: Side, rank: int, length: int) -> Weighing:
    """A rank that serves its part of tokens [0, length), whole virtual blocks, in a session for every repetition."""
    shard, tokens = side.shard_of(rank), np.arange(length)
    blocks = side.layout.blocks_needed(shard, length)
    store, rows = store_of(args, blocks, side.layout.block_size)
    rows[:] = pattern(args, tokens[side.layout.owners(tokens) == shard])[..., None]
    place = Place(side, rank, INSTANCE, "")
    leases = LeaseTable(Generations(blocks), time.monotonic, LEASE_S)
    for session in range(args.runs + 1):
        leases.grant(session, 0, 0, range(blocks), length, {0})
    return Weighing(Source(place, facts_of(place, store.geometry, "bench", "bytes"), store, leases))


async def move(args: Namespace, layout: Layout, counted: Mapping[int, Traffic]) -> dict[int, list[float]]:
    """Pulls tokens [0, end) from ranks of the layout for each end in turn, and again `args.runs` times.

    Returns the seconds of each repetition by end, from the call of the puller to the last byte in its pool. `Internal` when a
    pull fails, moves anything but what was counted for its end, or leaves anything else in the target's pool.
    """
    source, target = side_of(layout), side_of(target_of(layout))
    length = layout.virtual_blocks(max(counted)) * layout.virtual_block_size
    times: dict[int, list[float]] = {end: [] for end in counted}
    async with AsyncExitStack() as stack:
        servicers, peers = [], {}
        for rank in range(source.grid.world_size):
            servicers.append(source_of(args, source, rank, length))
            server = Server(HOST, 0, "data")
            server.add(add_to_server, servicers[-1], SERVICE)
            stack.push_async_callback(server.stop, 0)
            peers[rank] = Peer(await server.start(), INSTANCE)
        blocks = range(length // layout.block_size)
        store, rows = store_of(args, len(blocks), layout.block_size)
        place = Place(target, 0, "target", "")
        facts, generations = facts_of(place, store.geometry, "bench", "bytes"), Generations(len(blocks))
        limits = Limits(message_bytes=args.message_bytes, idle_s=WAIT_S, call_s=WAIT_S)
        puller = Puller(place, facts, store, generations, limits)
        stack.push_async_callback(puller.close)
        for session in range(args.runs + 1):
            for end, wanted in counted.items():
                rows.fill(UNTOUCHED)
                before, begun = sum(servicer.sent_bytes for servicer in servicers), time.perf_counter()
                try:
                    done = await puller.pull(Pull(session, 0, source, target, 0, end, blocks, 0, peers))
                except TransferFailed as failure:
                    raise Internal(str(failure)) from failure
                times[end].append(time.perf_counter() - begun)
                sent = sum(servicer.sent_bytes for servicer in servicers) - before
                moved = Traffic(done.payload_bytes, done.messages, sent)
                if moved != wanted:
                    raise Internal(f"tokens [0, {end}) from {layout}: counted {wanted}, moved {moved}")
                arrived = (rows[:, :end] == pattern(args, np.arange(end))[..., None]).all()
                if not (arrived and (rows[:, end:] == UNTOUCHED).all()):
                    raise Internal(f"tokens [0, {end}) from {layout}: the target's pool holds something else")
    return {end: seconds[1:] for end, seconds in times.items()}
