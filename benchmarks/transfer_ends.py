"""Both ends of `benchmarks.transfer`: a process that serves and one that takes.

Each exists twice: as gRPC leaves a process, and as a rank that transfers KV sets itself up (`kv_transfer.kept_memory`).
"""

import asyncio
import json
import mmap
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import count
from math import prod
from typing import Any

import grpc
import grpc.aio
import numpy as np

from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.reshard import Side
from cp_wire.channels import open_channel
from cp_wire.host import host_identity
from cp_wire.serve import Server
from kv_transfer.facts import Place, facts_of
from kv_transfer.generations import Generations
from kv_transfer.kept_memory import keep_freed_memory
from kv_transfer.leases import LeaseTable
from kv_transfer.pull import Limits, Peer, Pull
from kv_transfer.puller import Puller
from kv_transfer.service import SERVICE, KvTransferServicer, add_to_server
from kv_transfer.shared_memory import SharedPool
from kv_transfer.source import Source
from kv_transfer.store import ArrayStore

HOST = "127.0.0.1"
BARE_SERVICE = "kvloom.bench.Bare"
SHARDS = 2
LEASE_S = 600.0
START_S = 60.0
INSTANCE = "source"
WAYS = ("bare", "moving", "whole", "single", "shared")
STREAMS, TRANSFERS = WAYS[:2], WAYS[2:]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Int64s = np.ndarray[Any, np.dtype[np.int64]]


def side_of(args: Namespace, shards: int, interleave: int) -> Side:
    """Shards across replicas, so that one rank holds every head of its tokens."""
    return Side(Grid(pcp=shards, dcp=shards), Layout(shards, interleave, args.block_size), args.kv_heads)


def tokens_of(args: Namespace) -> int:
    """Length of a request of which one of SHARDS target ranks takes about `--mib` MiB, in whole virtual blocks."""
    per_block = args.planes * args.kv_heads * args.head_bytes * args.block_size
    return max(1, (args.mib << 20) // per_block) * args.block_size * SHARDS


def payload_of(args: Namespace) -> int:
    """Bytes that the target rank takes."""
    return tokens_of(args) // SHARDS * int(args.planes * args.kv_heads * args.head_bytes)


def pattern(args: Namespace, tokens: Bytes | Int64s) -> Bytes:
    """[planes, tokens] the byte that fills a row."""
    return ((tokens * 7 + np.arange(args.planes)[:, None] * 13) % 251).astype(np.uint8)


def store_of(args: Namespace, tokens: int, offered: bool) -> tuple[ArrayStore, Bytes]:
    """A pool of as many token slots, and the same as rows [planes, slots, bytes]; its pages are in memory. offered: to other
    processes, as ranks do that compute prompts; only ends that say they are on one host share it."""
    shape = (args.planes, tokens // args.block_size, args.block_size, args.kv_heads, args.head_bytes)
    shared = SharedPool(prod(shape)) if offered else None
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = np.frombuffer(mmap.mmap(-1, prod(shape), flags=private), np.uint8) if shared is None else shared.data
    data = memory.reshape(shape)
    data.fill(255)
    return ArrayStore(data, shared), data.reshape(args.planes, tokens, -1)


def sources_of(args: Namespace) -> dict[str, Source]:
    """The source rank of every way, all over one pool, with a lease per repetition."""
    length = tokens_of(args)
    store, rows = store_of(args, length, offered=True)
    rows[:] = pattern(args, np.arange(length))[..., None]
    generations = Generations(store.geometry.num_blocks)
    sources = {}
    for way in TRANSFERS:
        place = Place(side_of(args, 1, args.block_size), 0, INSTANCE, host_identity() if way == "shared" else "")
        leases = LeaseTable(generations, time.monotonic, LEASE_S)
        for session in range(args.runs + 1):
            leases.grant(session, 0, 0, range(store.geometry.num_blocks), length, {0})
        sources[way] = Source(place, facts_of(place, store.geometry, "bench", "bytes"), store, leases)
    return sources


def num_messages(args: Namespace) -> int:
    """Of a bare stream of the payload; the last one is full there, so a little more travels than in a transfer."""
    return -(-payload_of(args) // int(args.message_bytes))


def messages_of(args: Namespace, count: int) -> list[bytes]:
    """So many different places in memory."""
    return [bytes([number % 251]) * args.message_bytes for number in range(count)]


def add_stream(messages: Sequence[bytes], server: grpc.aio.Server) -> None:
    """A method that sends as many messages as it is asked for, in turn."""

    async def stream(request: bytes, context: grpc.aio.ServicerContext) -> None:
        for number in range(int(request)):
            await context.write(messages[number % len(messages)])

    handlers = {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(BARE_SERVICE, handlers),))


async def serve(args: Namespace) -> None:
    """The serving process: prints its addresses, one per way, and serves until its input closes."""
    if args.keep:
        keep_freed_memory()
    sources, servers = sources_of(args), [Server(HOST, 0, "data") for _ in WAYS]
    try:
        for way, server in zip(WAYS, servers, strict=True):
            if way in STREAMS:
                server.add(add_stream, messages_of(args, 1 if way == "bare" else num_messages(args)), BARE_SERVICE)
            else:
                server.add(add_to_server, KvTransferServicer(sources[way]), SERVICE)
            print(await server.start(), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        for server in servers:
            await server.stop(0)


class Stopwatch:
    """Wall time and CPU time of this process since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self, share: float = 1.0) -> dict[str, float]:
        """Both, times the share of it that counts."""
        return {
            "seconds": (time.perf_counter() - self._wall) * share,
            "cpu_seconds": (time.process_time() - self._cpu) * share,
        }


async def stream_times(args: Namespace, address: str, kept: bool) -> AsyncIterator[dict[str, Any]]:
    """Times of each repetition of a bare stream. kept: each message is written to a place of its own."""
    messages = num_messages(args)
    places = np.full((messages if kept else 0, args.message_bytes), 255, np.uint8)
    async with open_channel(address, "data") as channel:
        stream = channel.unary_stream(f"/{BARE_SERVICE}/Stream")
        while True:
            watch = Stopwatch()
            call = stream(str(messages).encode(), timeout=START_S)
            got = 0
            while (data := await call.read()) is not grpc.aio.EOF:
                if kept:
                    places[got] = np.frombuffer(data, np.uint8)
                got += 1
            yield watch.read(payload_of(args) / (got * args.message_bytes))


class Receiver:
    """The target rank of one way."""

    def __init__(self, args: Namespace, way: str, address: str) -> None:
        self._args = args
        target = side_of(args, SHARDS, 1 if way == "single" else args.block_size)
        length = tokens_of(args)
        store, self._rows = store_of(args, length // SHARDS, offered=False)
        generations = Generations(store.geometry.num_blocks)
        place = Place(target, 0, "target", host_identity() if way == "shared" else "")
        facts = facts_of(place, store.geometry, "bench", "bytes")
        limits = Limits(
            message_bytes=args.message_bytes,
            bytes_in_flight=1 << 30,
        )
        self._puller = Puller(place, facts, store, generations, limits)
        blocks = range(store.geometry.num_blocks)
        source = side_of(args, 1, args.block_size)
        self._pull = Pull(0, 0, source, target, 0, length, blocks, 0, {0: Peer(address, INSTANCE)})
        tokens = np.arange(length)
        self._tokens = tokens[target.layout.owners(tokens) == 0]

    async def times(self) -> AsyncIterator[dict[str, Any]]:
        """Times of each repetition, from the call of the puller to the last byte in its pool, and what it reports."""
        for session in count():
            watch = Stopwatch()
            done = await self._puller.pull(replace(self._pull, session=session))
            times = watch.read()
            assert (self._rows == pattern(self._args, self._tokens)[..., None]).all()
            self._rows.fill(255)
            yield times | {"messages": done.messages, "shared_bytes": done.shared_bytes, "retries": done.retries}


async def take(args: Namespace) -> None:
    """The taking process: for each line of its input, a way and an address, it takes once and prints one JSON line; it ends
    with its input."""
    if args.keep:
        keep_freed_memory()
    runs: dict[str, AsyncIterator[dict[str, Any]]] = {}
    while line := await asyncio.to_thread(sys.stdin.readline):
        way, address = line.split()
        if way not in runs:
            runs[way] = stream_times(args, address, way == "moving") if way in STREAMS else Receiver(args, way, address).times()
        print(json.dumps(await anext(runs[way])), flush=True)
