"""What a rank does for those who read its KV: says what it has, packs messages, keeps leases. Knows nothing of gRPC calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cp_layout.errors import LayoutError
from cp_layout.packing import Packing
from cp_layout.reshard import Link, reshard
from cp_wire.errors import ConfigRefused, InvalidRequest, Stale
from cp_wire.pb import kv_transfer_pb2 as pb
from kv_transfer import framing
from kv_transfer.facts import Place, require_equal, side_of
from kv_transfer.leases import Lease, LeaseTable
from kv_transfer.store import Bytes, Picked, Store, pick

MAX_MESSAGE_BYTES = 2 << 20
"""Larger messages only go slower."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What one target rank reads here of one token range, in messages of one size."""

    link: Link
    packing: Packing
    picked: Picked


class Claim(NamedTuple):
    """What a fetch says of the blocks that it reads. It is looked at twice for each message."""

    session: int
    epoch: int
    instance: str
    target_rank: int
    generation: int
    reads: tuple[int, int, int]
    """What replaces one another: attempts of one reader at one range."""
    attempt: int

    @classmethod
    def of(cls, request: pb.FetchRequest) -> "Claim":
        """That of a call."""
        reads = request.target_rank, request.start, request.end
        who = request.session, request.epoch, request.instance, request.target_rank
        return cls(*who, request.generation, reads, request.attempt)


class Fetch:
    """One accepted `Fetch` call: `frame` packs its messages, one at a time."""

    def __init__(self, source: "Source", request: pb.FetchRequest, claim: Claim, outgoing: Outgoing) -> None:
        self.messages: Sequence[int] = list(request.messages)
        self._source = source
        self._claim = claim
        self._outgoing = outgoing
        self._stream = framing.Stream(
            session=request.session,
            attempt=request.attempt,
            epoch=request.epoch,
            generation=request.generation,
            source_rank=outgoing.link.src,
            target_rank=outgoing.link.dst,
            start=request.start,
            end=request.end,
        )

    def frame(self, position: int) -> bytes:
        """Packs the message at this position of `messages`.

        The identity of the blocks is checked before they are read and again afterwards, so bytes of another owner are never
        sent: `LeaseEnded` or `Stale` instead.
        """
        message, source = self.messages[position], self._source
        packing, picked = self._outgoing.packing, self._outgoing.picked
        rows = packing.rows(message)

        def read(payload: Bytes) -> None:
            source.lease_for(self._claim)
            source.store.read(picked, rows, payload)
            source.lease_for(self._claim)

        header = framing.Header(self._stream, message, rows.start, len(rows))
        return framing.encode(header, len(rows) * packing.row_bytes, read)


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


class Source:
    """The readable end of one rank. All methods belong to one thread; `store` may be written by another meanwhile."""

    def __init__(self, place: Place, facts: pb.KvFacts, store: Store, leases: LeaseTable) -> None:
        self.place = place
        self.facts = facts
        self.store = store
        self.leases = leases

    def describe(self, request: pb.DescribeRequest) -> pb.DescribeResponse:
        """The handshake; `ConfigRefused` names the field that differs."""
        require_equal(self.facts, request.facts)
        lease = self._lease(request.session, request.epoch, self.place.instance)
        described = pb.DescribeResponse(
            facts=self.facts,
            tokens=lease.tokens,
            shard_offset=lease.shard_offset,
            generation=lease.generation,
            lease_ms=_milliseconds(lease.ttl_s),
        )
        pool = self.store.shared
        if pool is not None and request.facts.host == self.place.host != "":
            described.pool.CopyFrom(pool.message())
            described.pool.num_blocks = self.store.geometry.num_blocks
            first = request.first_column
            described.blocks.extend(lease.blocks[first : first + request.num_columns].tolist())
        return described

    def renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        """A whole lease from now, for one of its readers that reads no further than it may."""
        lease = self._read_by(request)
        if request.end > lease.tokens:
            raise InvalidRequest("end", request.end, f"at most the {lease.tokens} tokens that can be read")
        lease = self.leases.renew(request.session)
        return pb.RenewResponse(lease_ms=_milliseconds(lease.ttl_s), tokens=lease.tokens, generation=lease.generation)

    def release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        """The target rank has all it needs, or has given up; one of a former life of this process releases nothing."""
        if request.instance == self.place.instance:
            self.leases.release(request.session, request.target_rank)
        return pb.ReleaseResponse()

    def open(self, request: pb.FetchRequest) -> Fetch:
        """Accepts a fetch, or refuses it with what is wrong; nothing is read yet."""
        claim = Claim.of(request)
        lease = self.lease_for(claim)
        if not 1 <= request.message_bytes <= MAX_MESSAGE_BYTES:
            raise InvalidRequest("message_bytes", request.message_bytes, f"between 1 and {MAX_MESSAGE_BYTES}")
        if not request.start < request.end <= lease.tokens:
            raise InvalidRequest("end", request.end, f"tokens [{request.start}, end) of the {lease.tokens} that can be read")
        outgoing = self._outgoing(lease, request)
        num_messages = outgoing.packing.num_messages
        for message in request.messages:
            if message >= num_messages:
                raise InvalidRequest("messages", message, f"there are {num_messages}")
        lease.attempts[claim.reads] = request.attempt
        return Fetch(self, request, claim, outgoing)

    def lease_for(self, claim: Claim) -> Lease:
        """The lease the claim speaks of, if everything it says of it still holds."""
        lease = self._read_by(claim)
        if not claim.generation <= lease.generation:
            raise Stale(f"transfer {claim.session} is of generation {lease.generation}, not {claim.generation}")
        if lease.attempts.get(claim.reads, 0) > claim.attempt:
            raise Stale(f"attempt {claim.attempt} of transfer {claim.session} was replaced by a newer one")
        return lease

    def _read_by(self, request: Claim | pb.RenewRequest) -> Lease:
        lease = self._lease(request.session, request.epoch, request.instance)
        if request.target_rank not in lease.readers:
            raise Stale(f"rank {request.target_rank} has released transfer {request.session}, or was never to read it")
        return lease

    def _lease(self, session: int, epoch: int, instance: str) -> Lease:
        if instance != self.place.instance:
            raise Stale(f"this is instance {self.place.instance}, the call is for {instance or 'none'}")
        lease = self.leases.get(session)
        if lease.epoch != epoch:
            raise Stale(f"transfer {session} is of epoch {lease.epoch}, the call of {epoch}")
        return lease

    def _outgoing(self, lease: Lease, request: pb.FetchRequest) -> Outgoing:
        target = request.target.SerializeToString(deterministic=True)
        key = (target, request.target_rank, request.start, request.end, request.message_bytes)
        if key not in lease.plans:
            lease.plans[key] = self._plan(lease, request)
        found: Outgoing = lease.plans[key]
        return found

    def _plan(self, lease: Lease, request: pb.FetchRequest) -> Outgoing:
        side = self.place.side
        own = type(side)(side.grid, side.layout, side.kv_heads, lease.shard_offset)
        try:
            plan = reshard(own, side_of(request.target, side.kv_heads), request.start, request.end)
            links = [link for link in plan.links if (link.src, link.dst) == (self.place.rank, request.target_rank)]
            if not links:
                raise ConfigRefused(f"rank {self.place.rank} has nothing for rank {request.target_rank} of this target")
            slots = plan.runs_of(links[0]).src_slots(lease.blocks, own.layout.block_size)
        except LayoutError as refusal:
            raise ConfigRefused(f"transfer {request.session}: {refusal}") from refusal
        (link,), geometry = links, self.store.geometry
        packing = Packing(geometry.planes, len(slots), link.num_heads * geometry.head_bytes, request.message_bytes)
        return Outgoing(link, packing, pick(geometry, slots, link.src_head, link.num_heads, packing.rows_per_message))
