"""KV from rank to rank, against a bare byte stream: `kvloom bench transfer`.

Two processes: one serves a pool as a rank does, and a stream of ready-made messages of the same size; the other pulls. In
turn, in one run: the bare stream (gRPC, no protobuf, no pool), a transfer with I = B, one with I = 1, and one through shared
memory. Every transfer is checked to have moved each byte to its place. Rates count payload bytes.
"""

import asyncio
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from math import prod
from statistics import median
from typing import Any

import grpc
import grpc.aio
import numpy as np
import uvloop

from benchmarks.harness import machine, parser, report, spread
from cp_client.guard import guarded
from cp_client.interpreter import same_code_environment
from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.reshard import Side
from cp_wire.channels import open_channel
from cp_wire.flags import integer
from cp_wire.host import host_identity
from cp_wire.serve import Server
from kv_transfer.facts import Place, facts_of
from kv_transfer.generations import Generations
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
WAYS = ("bare", "whole", "single", "shared")
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Int64s = np.ndarray[Any, np.dtype[np.int64]]
NAMES = {
    "bare": "bare gRPC stream",
    "whole": "transfer, I = B",
    "single": "transfer, I = 1",
    "shared": "transfer, I = B, shared memory",
}


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


def store_of(args: Namespace, tokens: int) -> tuple[ArrayStore, Bytes]:
    """A pool of as many token slots, and the same as rows [planes, slots, bytes]; its pages are in memory. Only ends that say
    they are on one host share it."""
    shape = (args.planes, tokens // args.block_size, args.block_size, args.kv_heads, args.head_bytes)
    shared = SharedPool(prod(shape))
    data = shared.data.reshape(shape)
    data.fill(255)
    return ArrayStore(data, shared), data.reshape(args.planes, tokens, -1)


def sources_of(args: Namespace) -> dict[str, Source]:
    """The source rank of every way, all over one pool, with a lease per repetition."""
    length = tokens_of(args)
    store, rows = store_of(args, length)
    rows[:] = pattern(args, np.arange(length))[..., None]
    generations = Generations(store.geometry.num_blocks)
    sources = {}
    for way in WAYS[1:]:
        place = Place(side_of(args, 1, args.block_size), 0, INSTANCE, host_identity() if way == "shared" else "")
        leases = LeaseTable(generations, time.monotonic, LEASE_S)
        for session in range(args.runs + 1):
            leases.grant(session, 0, 0, range(store.geometry.num_blocks), length, {0})
        sources[way] = Source(place, facts_of(place, store.geometry, "bench", "bytes"), store, leases)
    return sources


async def serve(args: Namespace) -> None:
    """The serving process: prints its addresses, one per way, and serves until its input closes."""
    message = bytes(args.message_bytes)

    async def bare(request: bytes, context: grpc.aio.ServicerContext) -> None:
        for _ in range(int(request)):
            await context.write(message)

    def add_bare(_: object, server: grpc.aio.Server) -> None:
        handlers = {"Stream": grpc.unary_stream_rpc_method_handler(bare)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(BARE_SERVICE, handlers),))

    sources = sources_of(args)
    servers = []
    for way in WAYS:
        server = Server(HOST, 0, "data")
        if way == "bare":
            server.add(add_bare, None, BARE_SERVICE)
        else:
            server.add(add_to_server, KvTransferServicer(sources[way]), SERVICE)
        print(await server.start(), flush=True)
        servers.append(server)
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        await server.stop(0)


@asynccontextmanager
async def serving(argv: Sequence[str]) -> AsyncIterator[dict[str, str]]:
    """The serving process's addresses by way; the process ends with the context."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "benchmarks.transfer", *argv, "--serve"]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=same_code_environment())
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            addresses = {way: (await process.stdout.readline()).decode().strip() for way in WAYS}
        yield addresses
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), START_S)
        except TimeoutError:
            process.kill()


async def bare_seconds(args: Namespace, address: str) -> AsyncIterator[float]:
    """Seconds of each repetition of the bare stream."""
    messages = -(-payload_of(args) // args.message_bytes)
    async with open_channel(address, "data") as channel:
        stream = channel.unary_stream(f"/{BARE_SERVICE}/Stream")
        while True:
            begun = time.perf_counter()
            call = stream(str(messages).encode(), timeout=START_S)
            got = 0
            while (data := await call.read()) is not grpc.aio.EOF:
                got += len(data)
            seconds = time.perf_counter() - begun
            # The last message is full here, so a little more travels than in a transfer.
            yield seconds * payload_of(args) / got


class Receiver:
    """The target rank of one way."""

    def __init__(self, args: Namespace, way: str, address: str) -> None:
        self._args = args
        target = side_of(args, SHARDS, 1 if way == "single" else args.block_size)
        length = tokens_of(args)
        store, self._rows = store_of(args, length // SHARDS)
        generations = Generations(store.geometry.num_blocks)
        place = Place(target, 0, "target", host_identity() if way == "shared" else "")
        facts = facts_of(place, store.geometry, "bench", "bytes")
        limits = Limits(
            message_bytes=args.message_bytes,
            bytes_in_flight=1 << 30,
        )
        self.puller = Puller(place, facts, store, generations, limits)
        blocks = range(store.geometry.num_blocks)
        source = side_of(args, 1, args.block_size)
        self._pull = Pull(0, 0, source, target, 0, length, blocks, 0, {0: Peer(address, INSTANCE)})
        tokens = np.arange(length)
        self._tokens = tokens[target.layout.owners(tokens) == 0]

    async def seconds(self) -> AsyncIterator[float]:
        """Seconds of each repetition, from the call of the puller to the last byte in its pool."""
        for session in count():
            begun = time.perf_counter()
            self.done = await self.puller.pull(replace(self._pull, session=session))
            yield time.perf_counter() - begun
            assert (self._rows == pattern(self._args, self._tokens)[..., None]).all()
            self._rows.fill(255)


async def measure(args: Namespace, argv: Sequence[str]) -> list[dict[str, Any]]:
    """One row per way; the first repetition of each warms up and is not counted."""
    async with serving(argv) as addresses:
        receivers = {way: Receiver(args, way, addresses[way]) for way in WAYS[1:]}
        runs = {"bare": bare_seconds(args, addresses["bare"])} | {way: each.seconds() for way, each in receivers.items()}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.runs + 1):
            for way in WAYS:
                times[way].append(await anext(runs[way]))
        for way in WAYS:
            await runs[way].aclose()  # type: ignore[attr-defined]
        for each in receivers.values():
            await each.puller.close()
    base = median(times["bare"][1:])
    rows = []
    for way in WAYS:
        counted = times[way][1:]
        row: dict[str, Any] = {"way": way, "name": NAMES[way]}
        row["gib_per_s"] = spread([payload_of(args) / seconds / (1 << 30) for seconds in counted])
        row["ratio"] = round(base / median(counted), 3)
        if way != "bare":
            done = receivers[way].done
            row |= {"messages": done.messages, "shared_bytes": done.shared_bytes, "retries": done.retries}
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser("transfer", "KV from rank to rank against a bare stream")
    flags.add_argument("--mib", type=integer(1, 4096), default=128, help="MiB of KV to move (default: 128)")
    flags.add_argument("--planes", type=integer(1), default=64, help="layers · 2 (default: 64)")
    flags.add_argument("--kv-heads", type=integer(1), default=8, help="(default: 8)")
    flags.add_argument("--head-bytes", type=integer(1), default=256, help="head size · bytes of the dtype (default: 256)")
    flags.add_argument("--block-size", type=integer(1), default=16, help="tokens per block (default: 16)")
    flags.add_argument("--message-bytes", type=integer(1, 2 << 20), default=1 << 20, help="(default: 1048576)")
    flags.add_argument("--runs", type=integer(1), default=7, help="repetitions of every way (default: 7)")
    flags.add_argument("--serve", action="store_true", help="what the benchmark gives to the process it starts")
    words = list(sys.argv[1:] if argv is None else argv)
    args = flags.parse_args(words)
    if args.serve:
        uvloop.run(serve(args))
        return 0
    rows = uvloop.run(measure(args, words))
    document = {"benchmark": "transfer", "machine": machine(), "payload_bytes": payload_of(args), "rows": rows}
    lines = [f"{payload_of(args)} bytes, {args.runs} runs in turn: median (range) in GiB/s, times the bare stream"]
    lines += [
        f"{row['name']:>31} {row['gib_per_s']['median']:>6.2f} ({row['gib_per_s']['min']:.2f}–{row['gib_per_s']['max']:.2f})"
        f"  {row['ratio']:.2f}×"
        for row in rows
    ]
    report(args, document, lines)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
