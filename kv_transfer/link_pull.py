"""Pulling from one source rank: handshake, fetches, renewals, further attempts."""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import grpc.aio

from cp_layout.errors import LayoutError
from cp_layout.reshard import Link, Runs
from cp_wire import errors
from cp_wire.pb import kv_transfer_pb2 as pb
from cp_wire.pb import kv_transfer_pb2_grpc
from kv_transfer.budget import Budget
from kv_transfer.facts import require_equal, require_place, side_message
from kv_transfer.framing import FETCH, Corrupted, decode
from kv_transfer.generations import Generations
from kv_transfer.incoming import Incoming, TargetReused
from kv_transfer.pull import Limits, Pull, Report, TransferFailed
from kv_transfer.shared_memory import Offer
from kv_transfer.store import Store
from kv_transfer.tasks import together

BACK_OFF_S = 0.1
"""Before another attempt at a source that could not be reached; grows with the attempts."""
SHARED_STREAMS = 2
"""Fetches that alternate: while one memory is emptied, the other is filled."""


@dataclass(frozen=True, slots=True)
class Target:
    """What all links of a rank's pulls share."""

    facts: pb.KvFacts
    store: Store
    generations: Generations
    limits: Limits
    budget: Budget
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
        self._may_share = target.limits.shared_messages > 0
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
        shared = self._may_share and described.facts.host != "" and described.facts.host == self._target.facts.host
        incoming = self._incoming or self._expect(shared)
        self._incoming = incoming
        incoming.begin(attempt, described.generation)
        renewing = asyncio.create_task(self._renew(described.lease_ms / 1000))
        try:
            if shared:
                await self._fetch_shared(incoming, attempt, described.generation)
            else:
                async with self._target.budget.hold(2 * self._limits.message_bytes):
                    todo = sorted(incoming.missing)
                    await self._fetch(incoming, self._request(attempt, described.generation, todo), None)
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])
        if incoming.missing:
            raise Corrupted(f"{len(incoming.missing)} of {incoming.packing.num_messages} messages were damaged or lost")

    async def _describe(self) -> pb.DescribeResponse:
        """The handshake; raises `KvloomError`."""
        pull = self._pull
        request = pb.DescribeRequest(session=pull.session, epoch=pull.epoch, facts=self._target.facts)
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
        return described

    def _expect(self, shared: bool) -> Incoming:
        limits, target = self._limits, self._target
        size = limits.shared_message_bytes if shared else limits.message_bytes
        try:
            return Incoming(self._pull, self._link, self._runs, target.store, target.generations, size, self._report)
        except LayoutError as refusal:
            raise errors.ConfigRefused(str(refusal)) from refusal

    async def _fetch_shared(self, incoming: Incoming, attempt: int, generation: int) -> None:
        """Takes what is missing through memory of this rank: fetches of a few messages each, two at a time."""
        todo = deque(sorted(incoming.missing))
        slot_bytes = incoming.size(0)
        slots = min(self._limits.shared_messages, len(todo))
        streams = min(SHARED_STREAMS, -(-len(todo) // slots))

        async def alternate(offer: Offer) -> None:
            while todo:
                some = [todo.popleft() for _ in range(min(slots, len(todo)))]
                request = self._request(attempt, generation, some)
                request.shared.CopyFrom(offer.message())
                await self._fetch(incoming, request, offer)

        async with self._target.budget.hold(streams * slots * slot_bytes):
            offers: list[Offer] = []
            try:
                offers += (Offer(slot_bytes, slots) for _ in range(streams))
                await together(alternate(offer) for offer in offers)
            except (errors.ConfigRefused, OSError) as error:
                # Memory that one end cannot make or the other cannot open: the stream remains.
                self._may_share, self._incoming = False, None
                raise errors.Unavailable(f"no memory is shared: {error}") from error
            finally:
                for offer in offers:
                    offer.close()

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

    async def _fetch(self, incoming: Incoming, request: pb.FetchRequest, offer: Offer | None) -> None:
        """One call: takes what comes until the source ends it; raises `KvloomError` when it ends badly or stands still."""
        slot_of = {message: slot for slot, message in enumerate(request.messages)}
        call = self._fetch_method(request, timeout=self._limits.deadline_s)
        try:
            while True:
                async with asyncio.timeout(self._limits.idle_s):
                    data = await call.read()
                if data is grpc.aio.EOF:
                    return
                try:
                    frame = decode(data)
                    payload = frame.payload
                    if offer is not None:
                        index = frame.header.message
                        if index not in slot_of:
                            raise Corrupted(f"message {index} was not asked for")
                        payload = offer.slots.slot(slot_of[index], incoming.size(index))
                    incoming.take(frame, payload, shared=offer is not None)
                except Corrupted:
                    self._report.corrupted += 1
        except TimeoutError as error:
            raise errors.DeadlineExceeded(f"no message for {self._limits.idle_s} s") from error
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc_error(error) from error
        finally:
            call.cancel()

    async def _renew(self, lease_s: float) -> None:
        """Prolongs the lease until cancelled, or until the source no longer grants it: then the fetch fails by itself."""
        request = pb.RenewRequest(session=self._pull.session, epoch=self._pull.epoch, instance=self._peer.instance)
        while True:
            await asyncio.sleep(lease_s / 3)
            try:
                await self._stub.Renew(request, timeout=min(self._limits.call_s, lease_s))
            except grpc.aio.AioRpcError:
                return
