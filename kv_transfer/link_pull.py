"""Pulling from one source rank: handshake, fetches, renewals, further attempts."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import grpc
import grpc.aio
import numpy as np

from cp_layout.errors import LayoutError
from cp_layout.reshard import Link, Runs
from cp_wire import errors
from cp_wire.logs import get_logger
from cp_wire.pb import kv_transfer_pb2 as pb
from cp_wire.pb import kv_transfer_pb2_grpc
from kv_transfer.budget import Budget
from kv_transfer.facts import require_equal, require_place, side_message
from kv_transfer.framing import FETCH, Corrupted, decode
from kv_transfer.generations import Generations
from kv_transfer.incoming import Incoming, TargetReused
from kv_transfer.open_pools import OpenPools
from kv_transfer.pull import Limits, Pull, Report, TransferFailed
from kv_transfer.store import ArrayStore, Geometry, Store, pick

log = get_logger("transfer")

BACK_OFF_S = 0.1
"""Before another attempt at a source that could not be reached; grows with the attempts."""


@dataclass(frozen=True, slots=True)
class Target:
    """What all links of a rank's pulls share."""

    facts: pb.KvFacts
    store: Store
    generations: Generations
    limits: Limits
    budget: Budget
    pools: OpenPools
    attempts: Iterator[int]
    """Numbers for all attempts of the rank, ascending: what an older one left on its way is told from the newer one's."""


class LinkPull:
    """One source rank's part of a pull. `run` returns when all of it is written, and raises `TransferFailed` otherwise."""

    def __init__(self, target: Target, pull: Pull, link: Link, runs: Runs, channel: grpc.aio.Channel, report: Report) -> None:
        self._target = target
        self._limits = target.limits
        self._pull = pull
        self._link = link
        self._runs = runs
        self._report = report
        self._peer = pull.peers[link.src]
        self._stub = kv_transfer_pb2_grpc.KvTransferServiceStub(channel)
        # No deserializer: a frame is taken apart without a copy of its payload.
        self._fetch_method = channel.unary_stream(FETCH, request_serializer=pb.FetchRequest.SerializeToString)
        self._incoming: Incoming | None = None

    async def run(self) -> None:
        """Attempts until nothing is missing; a fault that another attempt cannot mend ends them at once."""
        attempt = 0
        while True:
            attempt += 1
            self._report.retries += attempt > 1
            try:
                await self._attempt(next(self._target.attempts))
                return
            except errors.KvloomError as error:
                failure: tuple[str, str] = error.reason, error.message
                again, pause = error.retryable, BACK_OFF_S * attempt
            except Corrupted as error:
                failure, again, pause = ("CORRUPTED", str(error)), True, 0.0
            except TargetReused:
                failure, again, pause = ("TARGET_REUSED", "blocks of this rank were handed out again"), False, 0.0
            if not again or attempt >= self._limits.attempts:
                where = f"source rank {self._link.src} at {self._peer.address}, attempt {attempt}"
                raise TransferFailed(failure[0], self._pull, f"{where}: {failure[1]}", self._report)
            await asyncio.sleep(pause)

    async def _attempt(self, attempt: int) -> None:
        """`Corrupted` when messages are missing afterwards."""
        described = await self._describe()
        incoming = self._incoming = self._incoming or self._expect()
        incoming.begin(attempt, described.generation)
        renewing = asyncio.create_task(self._renew(described.lease_ms / 1000))
        try:
            pool = self._open(described)
            if pool is not None:
                await self._copy(incoming, pool, described)
            else:
                async with self._target.budget.hold(2 * self._limits.message_bytes):
                    await self._fetch(incoming, self._request(attempt, described.generation, sorted(incoming.missing)))
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])
        if incoming.missing:
            raise Corrupted(f"{len(incoming.missing)} of {incoming.packing.num_messages} messages were damaged or lost")

    async def _describe(self) -> pb.DescribeResponse:
        """The handshake; raises `KvloomError`."""
        pull = self._pull
        columns = self._runs.src_columns
        request = pb.DescribeRequest(
            session=pull.session,
            epoch=pull.epoch,
            facts=self._target.facts,
            first_column=columns.start,
            num_columns=len(columns),
        )
        try:
            described: pb.DescribeResponse = await self._stub.Describe(request, timeout=self._limits.call_s)
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc_error(error) from error
        require_place(pull.source, self._link.src, self._peer.instance, described.facts)
        require_equal(self._target.facts, described.facts)
        if described.shard_offset != pull.source.shard_offset:
            raise errors.ConfigRefused(
                f"shard_offset is {described.shard_offset} on rank {self._link.src}, the transfer was planned with "
                f"{pull.source.shard_offset}"
            )
        if pull.end > described.tokens:
            raise errors.InvalidRequest("end", pull.end, f"at most the {described.tokens} tokens that can be read")
        return described

    def _expect(self) -> Incoming:
        target, size = self._target, self._limits.message_bytes
        try:
            return Incoming(self._pull, self._link, self._runs, target.store, target.generations, size, self._report)
        except LayoutError as refusal:
            raise errors.ConfigRefused(str(refusal)) from refusal

    def _open(self, described: pb.DescribeResponse) -> ArrayStore | None:
        """The source's pool, if this rank can read it by itself."""
        if not described.HasField("pool"):
            return None
        own, layout = self._target.store.geometry, self._pull.source.layout
        heads = len(self._pull.source.heads_of(self._link.src))
        shape = Geometry(own.planes, described.pool.num_blocks, layout.block_size, heads, own.head_bytes).shape
        try:
            return ArrayStore(self._target.pools.get(described.pool, prod(shape)).reshape(shape))
        except errors.ConfigRefused as refusal:
            log.warning("a pool of this host cannot be read", source=self._link.src, why=refusal.message)
            return None

    async def _copy(self, incoming: Incoming, pool: ArrayStore, described: pb.DescribeResponse) -> None:
        """Takes what is missing from the source's pool, straight into this rank's.

        What was copied counts once the source has said, afterwards, that the blocks are still the session's, and this rank
        still one that reads them.
        """
        packing, geometry = incoming.packing, pool.geometry
        blocks, first = np.array(described.blocks, np.int64), self._runs.src_columns.start
        try:
            slots = self._runs.src_slots(blocks, geometry.block_size, first)
        except LayoutError as refusal:
            raise errors.ConfigRefused(f"source rank {self._link.src} has described too few blocks: {refusal}") from refusal
        picked = pick(geometry, slots, self._link.src_head, self._link.num_heads, packing.rows_per_message)
        copied = sorted(incoming.missing)
        for message in copied:
            incoming.copy(packing.rows(message), pool, picked)
            # The loop stays open for others: a message takes a fraction of a millisecond.
            await asyncio.sleep(0)
        await self._renew_once(self._limits.call_s)
        for message in copied:
            incoming.count(message)
            self._report.shared_bytes += len(packing.rows(message)) * packing.row_bytes

    def _request(self, attempt: int, generation: int, messages: list[int]) -> pb.FetchRequest:
        pull = self._pull
        assert self._incoming is not None
        return pb.FetchRequest(
            session=pull.session,
            attempt=attempt,
            epoch=pull.epoch,
            instance=self._peer.instance,
            generation=generation,
            target=side_message(pull.target),
            target_rank=self._link.dst,
            start=pull.start,
            end=pull.end,
            message_bytes=self._incoming.packing.message_bytes,
            messages=messages,
        )

    async def _fetch(self, incoming: Incoming, request: pb.FetchRequest) -> None:
        """One call: takes what comes until the source ends it; raises `KvloomError` when it ends badly or stands still."""
        call, idle_s = self._fetch_method(request, timeout=self._limits.deadline_s), self._limits.idle_s
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(idle_s) as patience:
                while (data := await call.read()) is not grpc.aio.EOF:
                    patience.reschedule(now() + idle_s)
                    try:
                        incoming.take(decode(data))
                    except Corrupted:
                        self._report.corrupted += 1
        except TimeoutError as error:
            raise errors.DeadlineExceeded(f"no message for {idle_s} s") from error
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc_error(error) from error
        finally:
            call.cancel()

    async def _renew(self, lease_s: float) -> None:
        """Prolongs the lease until cancelled, or until the source no longer grants it: then the fetch fails by itself."""
        while True:
            await asyncio.sleep(lease_s / 3)
            try:
                await self._renew_once(min(self._limits.call_s, lease_s))
            except errors.KvloomError:
                return

    async def _renew_once(self, timeout_s: float) -> None:
        """Raises `KvloomError` when the lease is no more."""
        pull = self._pull
        request = pb.RenewRequest(
            session=pull.session, epoch=pull.epoch, instance=self._peer.instance, target_rank=self._link.dst, end=pull.end
        )
        try:
            await self._stub.Renew(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc_error(error) from error
