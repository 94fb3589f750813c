"""Leases and pulls of a fake rank: tokens travel from memory to memory over gRPC addresses that name other fake ranks.

A pull reads what its sources have leased and nothing else, at the slots that the layouts of both sides say, and writes to the
slots of the blocks that it was given. Whoever computes in a block that is still read, or that is still written to, is refused.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio

from cp_layout.interleave import Layout
from cp_wire import errors
from cp_wire.pb import rank_pb2

if TYPE_CHECKING:
    from tests.coordinator.fake_rank import FakeRank

BYTES_PER_TOKEN = 8

PROCESSES: dict[str, "FakeRank"] = {}
"""Living ranks by instance: what a network is to real ones."""


@dataclass
class Session:
    """Blocks that others may read."""

    blocks: list[int]
    tokens: int
    shard_offset: int


class FakeKv:
    """One rank's part of all transfers. Faults are switched on from outside."""

    def __init__(self, rank: "FakeRank") -> None:
        self._rank = rank
        self.leases: dict[int, Session] = {}
        self.writing: dict[int, set[int]] = {}
        """Blocks of the pulls that run, by session."""
        self.ended: set[int] = set()
        self.pulls: list[rank_pb2.PullRequest] = []
        self.lease_requests: list[rank_pb2.LeaseRequest] = []
        self.attempts: dict[int, int] = {}
        self.failures: list[rank_pb2.PullFailure] = []
        """What the next pulls answer, after they have written half of what they were to."""
        self.refuse_lease: errors.KvloomError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.at_gate = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[rank_pb2.PullFailure | None]] = {}

    @property
    def open(self) -> int:
        """Sessions of either kind that are not over."""
        return len(self.leases) + len(self.writing)

    def reset(self) -> None:
        self.leases.clear()
        for session in list(self._tasks):
            self._tasks[session].cancel()

    def check_call(self, instance: str, epoch: int) -> None:
        """Calls of another life or epoch are refused."""
        if (instance, epoch) != (self._rank.instance, self._rank._epoch):
            raise errors.Stale(f"rank {self._rank.rank} is {self._rank.instance} at epoch {self._rank._epoch}")

    def check_write(self, slot: tuple[int, int, int]) -> None:
        """The rank computes the KV of a slot."""
        member, block, _ = slot
        if member == self._member:
            assert not any(block in blocks for blocks in self.writing.values()), f"block {block} is computed in and written to"

    async def hold(self) -> None:
        """Returns once a pull waits at the closed gate."""
        self.gate.clear()
        self.at_gate.clear()
        await asyncio.wait_for(self.at_gate.wait(), 5)

    async def lease(self, request: rank_pb2.LeaseRequest) -> rank_pb2.LeaseResponse:
        if self.refuse_lease is not None:
            raise self.refuse_lease
        self.lease_requests.append(request)
        held = self.leases.get(request.session)
        if held is None:
            if request.session in self.ended:
                raise errors.LeaseEnded("over")
            held = self.leases[request.session] = Session([], 0, request.shard_offset)
        assert request.first_column <= len(held.blocks) and request.ttl_ms and request.target_ranks
        held.blocks[request.first_column : request.first_column + len(request.block_ids)] = request.block_ids
        held.tokens = max(held.tokens, request.tokens)
        shard = self.layout.shard_on(self._member, held.shard_offset)
        # More would be blocks of a step that is still under way: a real rank may see them handed out after the lease.
        assert len(held.blocks) == self.layout.blocks_needed(shard, held.tokens), "blocks of unfinished steps are leased"
        return rank_pb2.LeaseResponse()

    async def end_lease(self, request: rank_pb2.EndLeaseRequest) -> rank_pb2.EndLeaseResponse:
        self.ended.add(request.session)
        return rank_pb2.EndLeaseResponse(how="cancelled" if self.leases.pop(request.session, None) else "")

    async def pull(self, request: rank_pb2.PullRequest) -> rank_pb2.PullResponse:
        if request.session in self.ended or request.attempt <= self.attempts.get(request.session, 0):
            raise errors.Stale("over, or too late")
        self.pulls.append(request)
        self.attempts[request.session] = request.attempt
        task = self._tasks[request.session] = asyncio.ensure_future(self._pull(request))
        try:
            failure = await task
        except errors.KvloomError as error:
            failure = rank_pb2.PullFailure(reason=error.reason, message=error.message, transient=error.retryable)
            return rank_pb2.PullResponse(failure=failure)
        finally:
            task.cancel()
        if failure is not None:
            return rank_pb2.PullResponse(failure=failure)
        count = sum(self._owns(request, position) for position in range(request.start, request.end))
        return rank_pb2.PullResponse(payload_bytes=BYTES_PER_TOKEN * count, messages=1)

    async def end_pull(self, request: rank_pb2.EndPullRequest) -> rank_pb2.EndPullResponse:
        self.ended.add(request.session)
        task = self._tasks.pop(request.session, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        return rank_pb2.EndPullResponse()

    async def _pull(self, request: rank_pb2.PullRequest) -> rank_pb2.PullFailure | None:
        """The failure that it has taken for itself, if any: others that run beside it take other ones."""
        layout = self.layout
        mine = [position for position in range(request.start, request.end) if self._owns(request, position)]
        columns = {layout.block_column(position) for position in mine}
        self.writing[request.session] = {request.block_ids[column - request.first_column] for column in columns}
        try:
            for count, position in enumerate(mine):
                if not self.gate.is_set():
                    self.at_gate.set()
                    await self.gate.wait()
                if self.failures and 2 * count >= len(mine):
                    return self.failures.pop(0)
                column = layout.block_column(position) - request.first_column
                slot = self._member, request.block_ids[column], layout.block_offset(position)
                self._copy(slot, _read(request, position))
                await asyncio.sleep(0)
            return None
        finally:
            del self.writing[request.session]

    def _copy(self, slot: tuple[int, int, int], token: int) -> None:
        """Every rank of the side reads its fake history from all members' slots, so all of them learn of it."""
        for process in PROCESSES.values():
            if (process.role_first, process.set_index) == (self._rank.role_first, self._rank.set_index):
                process.memory[slot] = token

    def _owns(self, request: rank_pb2.PullRequest, position: int) -> bool:
        return self.shard_of(request) == self.layout.owner(position)

    def shard_of(self, request: rank_pb2.PullRequest) -> int:
        """The shard that the rank holds of the request."""
        return self.layout.shard_on(self._member, request.shard_offset)

    @property
    def layout(self) -> Layout:
        config = self._rank.config
        assert config is not None
        return Layout(config.dcp, config.interleave, config.block_size)

    @property
    def _member(self) -> int:
        return self._rank._grid.dcp_member(self._rank.index)


class KvCalls:
    """The part of a rank's service that runs beside the lane."""

    kv: FakeKv
    frozen: bool

    async def Lease(self, request: rank_pb2.LeaseRequest, context: grpc.aio.ServicerContext) -> rank_pb2.LeaseResponse:
        return await self._beside(self.kv.lease, request, context)

    async def EndLease(self, request: rank_pb2.EndLeaseRequest, context: grpc.aio.ServicerContext) -> rank_pb2.EndLeaseResponse:
        return await self._beside(self.kv.end_lease, request, context)

    async def Pull(self, request: rank_pb2.PullRequest, context: grpc.aio.ServicerContext) -> rank_pb2.PullResponse:
        return await self._beside(self.kv.pull, request, context)

    async def EndPull(self, request: rank_pb2.EndPullRequest, context: grpc.aio.ServicerContext) -> rank_pb2.EndPullResponse:
        return await self._beside(self.kv.end_pull, request, context)

    async def _beside(self, call, request, context: grpc.aio.ServicerContext):
        """A call beside the lane."""
        if self.frozen:
            await asyncio.Event().wait()
        try:
            self.kv.check_call(request.instance, request.epoch)
            return await call(request)
        except errors.KvloomError as error:
            await errors.abort(context, error)


def _read(request: rank_pb2.PullRequest, position: int) -> int:
    """The token at a position, from the source rank that has it."""
    source = request.source
    layout = Layout(source.dcp, source.interleave, source.block_size)
    member = layout.member_of(layout.owner(position), source.shard_offset)
    for each in request.sources:
        process = PROCESSES.get(each.instance)
        if process is None:
            raise errors.Unavailable(f"nobody is at {each.address}")
        if process.kv._member != member:
            continue
        lease = process.kv.leases.get(request.session)
        if lease is None:
            raise errors.LeaseEnded("the lease is over")
        assert position < lease.tokens and lease.shard_offset == source.shard_offset
        block = lease.blocks[layout.block_column(position)]
        return process.memory[member, block, layout.block_offset(position)]
    raise AssertionError(f"no source has position {position}")
