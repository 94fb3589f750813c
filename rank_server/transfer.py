"""KV that other ranks read here, and KV that this rank takes over from them. Belongs to the event loop.

Decides nothing: the coordinator leases the blocks of a request on the source ranks and has the target ranks pull; who sends
what to whom, both ends derive from the two sides by `cp_layout.reshard`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cp_layout.interleave import Layout
from cp_layout.reshard import Side
from cp_wire import errors
from cp_wire.logs import get_logger
from cp_wire.pb import kv_transfer_pb2, rank_pb2
from kv_transfer import facts
from kv_transfer.generations import Generations
from kv_transfer.kept_memory import keep_freed_memory
from kv_transfer.leases import Ended, LeaseTable, sweep
from kv_transfer.pull import Limits, Peer, Pull, Report, TransferFailed
from kv_transfer.puller import Puller
from kv_transfer.source import Fetch, Source
from model_files import ModelFiles
from rank_server.executor import Executor
from rank_server.pool_store import PoolStore, store_of
from rank_server.pulls import Pulls
from rank_server.sequences import PlanRefused
from rank_server.step_batch import fresh_blocks

log = get_logger("transfer")

TTL_S = 30.0
"""A lease whose grant does not say how long it lasts."""
SWEEP_S = 0.5
"""How often leases that nobody asks for are looked at."""

_TRANSIENT = {"CORRUPTED"} | {kind.reason for kind in errors.TABLE if kind.retryable}
"""Reasons of failed pulls that another pull of the same range may not meet."""


@dataclass(frozen=True, slots=True)
class _Ends:
    """Both ends of transfers over the rank's pool."""

    layout: Layout
    member: int
    index: int
    side: Side
    num_blocks: int
    store: PoolStore
    generations: Generations
    source: Source
    puller: Puller
    sweeping: asyncio.Task[None]

    @property
    def leases(self) -> LeaseTable:
        """Leases on blocks of the pool."""
        return self.source.leases


class Transfers:
    """What a rank does for the calls of `RankService` about KV, and for those of `KvTransferService`.

    Which instance and epoch a call of the coordinator means, the caller has checked. Before the first of them there is
    nothing to lose, so everything is made then. clock: seconds, monotonic.
    """

    def __init__(
        self,
        executor: Executor,
        files: ModelFiles,
        instance: str,
        host: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        limits: Limits | None = None,
    ) -> None:
        self._executor = executor
        self._files = files
        self._instance = instance
        self._host = host
        self._clock = clock
        self._limits = limits
        self._ends: _Ends | None = None
        self._pulls = Pulls()

    @property
    def active(self) -> tuple[int, int]:
        """Sessions that can be read here, sessions that this rank pulls."""
        return 0 if self._ends is None else self._ends.leases.active, self._pulls.sessions

    def stamp(self, plan: rank_pb2.StepPlan) -> None:
        """Before a plan runs: its new blocks have new owners. `PlanRefused` for blocks that the pool does not have."""
        if self._ends is None:
            return
        try:
            self._ends.generations.stamp(fresh_blocks(plan, self._ends.layout, self._ends.member))
        except IndexError as error:
            raise PlanRefused(f"step {plan.ticket} hands out {error}") from error

    async def lease(self, request: rank_pb2.LeaseRequest) -> rank_pb2.LeaseResponse:
        """Grants, extends or prolongs a session, as far as it is not that already."""
        ends = self._opened()
        _check_blocks(request.block_ids, ends.num_blocks)
        for name in ("ttl_ms", "target_ranks"):
            if not getattr(request, name):
                raise errors.InvalidRequest(name, getattr(request, name), "a lease has readers and lasts")
        ends.store.fence()
        try:
            held = ends.leases.get(request.session)
        except errors.Unknown:
            self._grant(ends, request)
        else:
            ends.leases.extend(request.session, _added(held.blocks, request), max(request.tokens, held.tokens))
        return rank_pb2.LeaseResponse()

    async def end_lease(self, request: rank_pb2.EndLeaseRequest) -> rank_pb2.EndLeaseResponse:
        """Ends a session. A read in progress looks at its lease again before it counts, so nobody has to be waited for."""
        return rank_pb2.EndLeaseResponse(how=self._opened().leases.close(request.session) or "")

    async def pull(self, request: rank_pb2.PullRequest) -> rank_pb2.PullResponse:
        """Pulls a range; a failed transfer is an answer, a call that makes no sense an error."""
        ends, began = self._opened(), self._clock()
        _check_pull(ends, request)
        response = rank_pb2.PullResponse()
        try:
            report = await self._pulls.run(request.session, request.attempt, lambda: _pull(ends, request))
        except TransferFailed as failed:
            report = failed.report
            response.failure.reason, response.failure.message = failed.reason, str(failed)
            response.failure.transient = failed.reason in _TRANSIENT
        for name in ("payload_bytes", "messages", "shared_bytes", "corrupted", "duplicates", "stale", "retries"):
            setattr(response, name, getattr(report, name))
        response.duration_us = round((self._clock() - began) * 1e6)
        return response

    async def end_pull(self, request: rank_pb2.EndPullRequest) -> rank_pb2.EndPullResponse:
        """Ends a session; nothing of it is written afterwards."""
        await self._pulls.end(request.session)
        return rank_pb2.EndPullResponse()

    async def reset(self) -> None:
        """All sessions are over, at both ends."""
        await self._pulls.end_all()
        if self._ends is not None:
            self._ends.leases.cancel_all()

    async def close(self) -> None:
        """Like `reset`, for good: channels and mappings go too."""
        await self.reset()
        if self._ends is not None:
            self._ends.sweeping.cancel()
            await asyncio.wait([self._ends.sweeping])
            await self._ends.puller.close()
            if self._ends.store.shared is not None:
                self._ends.store.shared.close()

    def describe(self, request: kv_transfer_pb2.DescribeRequest) -> kv_transfer_pb2.DescribeResponse:
        """See `Source.describe`; the same for those below. `Unavailable` before the rank has a pool."""
        return self._opened().source.describe(request)

    def renew(self, request: kv_transfer_pb2.RenewRequest) -> kv_transfer_pb2.RenewResponse:
        """See `Source.renew`."""
        return self._opened().source.renew(request)

    def release(self, request: kv_transfer_pb2.ReleaseRequest) -> kv_transfer_pb2.ReleaseResponse:
        """See `Source.release`."""
        return self._opened().source.release(request)

    def open(self, request: kv_transfer_pb2.FetchRequest) -> Fetch:
        """See `Source.open`."""
        return self._opened().source.open(request)

    def _opened(self) -> _Ends:
        if self._ends is None:
            try:
                self._ends = self._make()
            except PlanRefused as refusal:
                raise errors.Unavailable(str(refusal)) from refusal
        return self._ends

    def _make(self) -> _Ends:
        keep_freed_memory()
        place, pool, shape = self._executor.place, self._executor.pool, self._files.shape
        grid = type(place.grid)(place.grid.tp, place.grid.pcp, place.grid.dcp)
        side = Side(grid, place.layout, None if shape.mla is not None else shape.num_kv_heads)
        store = store_of(pool, self._executor.shared_memory)
        stands = facts.Place(side, place.index, self._instance, self._host)
        told = facts.facts_of(stands, store.geometry, self._files.hash, str(pool.dtype).removeprefix("torch."))
        generations = Generations(pool.num_blocks)
        leases = LeaseTable(generations, self._clock, TTL_S)
        return _Ends(
            layout=place.layout,
            member=place.member,
            index=place.index,
            side=side,
            num_blocks=pool.num_blocks,
            store=store,
            generations=generations,
            source=Source(stands, told, store, leases),
            puller=Puller(stands, told, store, generations, self._limits),
            sweeping=asyncio.create_task(sweep(leases, _tell, SWEEP_S)),
        )

    def _grant(self, ends: _Ends, request: rank_pb2.LeaseRequest) -> None:
        if request.first_column:
            raise errors.InvalidRequest("first_column", request.first_column, "a session begins with column 0")
        ends.leases.grant(
            request.session,
            request.epoch,
            request.shard_offset,
            request.block_ids,
            request.tokens,
            request.target_ranks,
            request.ttl_ms / 1000,
        )


def _added(held: NDArray[np.int64], request: rank_pb2.LeaseRequest) -> list[int]:
    """What the request's columns add to those that are leased."""
    first, blocks = request.first_column, list(request.block_ids)
    if first > len(held):
        raise errors.InvalidRequest("first_column", first, f"{len(held)} columns are leased, none may be left out")
    known = len(held) - first
    if blocks[:known] != held[first : first + len(blocks)].tolist():
        raise errors.InvalidRequest("block_ids", blocks[:known], f"columns {first} and later are leased with other blocks")
    return blocks[known:]


async def _pull(ends: _Ends, request: rank_pb2.PullRequest) -> Report:
    own = ends.side
    target = replace(own, shard_offset=request.shard_offset)
    # Whoever had these blocks before, a lease on this rank included, has them no longer.
    generation = ends.generations.stamp(_written(ends, target, request))
    pull = Pull(
        session=request.session,
        epoch=request.source_epoch,
        source=facts.side_of(request.source, own.kv_heads),
        target=target,
        start=request.start,
        end=request.end,
        blocks=list(request.block_ids),
        first_column=request.first_column,
        generation=generation,
        peers={peer.rank: Peer(peer.address, peer.instance) for peer in request.sources},
    )
    ends.store.fence()
    return await ends.puller.pull(pull, request.timeout_ms / 1000)


def _written(ends: _Ends, target: Side, request: rank_pb2.PullRequest) -> list[int]:
    """Blocks that the range writes to. Those before it may be shared: a prefix that this side had already."""
    columns, first = target.layout.columns(target.shard_of(ends.index), request.start, request.end), request.first_column
    if len(columns) and not first <= columns.start < columns.stop <= first + len(request.block_ids):
        there = f"columns {columns.start} to {columns.stop - 1}, tokens [{request.start}, {request.end}) are in them"
        raise errors.InvalidRequest("block_ids", len(request.block_ids), f"{there}; column {first} is the first one given")
    return list(request.block_ids[columns.start - first : columns.stop - first]) if len(columns) else []


def _check_pull(ends: _Ends, request: rank_pb2.PullRequest) -> None:
    _check_blocks(request.block_ids, ends.num_blocks)
    if not request.start <= request.end:
        raise errors.InvalidRequest("end", request.end, f"the range begins at {request.start}")
    if not request.shard_offset < ends.side.layout.num_shards:
        raise errors.InvalidRequest("shard_offset", request.shard_offset, f"there are {ends.side.layout.num_shards} shards")
    if not request.timeout_ms:
        raise errors.InvalidRequest("timeout_ms", 0, "a pull takes time")


def _check_blocks(blocks: Sequence[int], num_blocks: int) -> None:
    if blocks and max(blocks) >= num_blocks:
        raise errors.InvalidRequest("block_ids", max(blocks), f"the pool has {num_blocks} blocks")


def _tell(ended: list[Ended]) -> None:
    for lease in ended:
        if lease.how == "expired":
            log.warning("a lease has expired", session=lease.session, blocks=len(lease.blocks))
