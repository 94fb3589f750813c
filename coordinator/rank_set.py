"""The life of one scheduling set: ranks join, groups open, steps run, something breaks, and again."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from coordinator import bring_up
from coordinator.cluster import SchedulingSet
from coordinator.engine import Engine
from coordinator.faults import COLLECTIVE_FAILED, CommandFailed, CommandTimedOut, RankFault, start_failure
from coordinator.link_measure import measure
from coordinator.monitor import watch
from coordinator.rank_link import RankLink
from coordinator.tasks import Background
from coordinator.timings import Timings
from cp_wire.errors import ConfigRefused, Duplicate, KvloomError, Unavailable
from cp_wire.logs import get_logger
from cp_wire.pb import common_pb2, coordinator_pb2

MAX_OPENINGS = 3
"""Attempts to open a set's groups before the rank that fails it is fenced."""

SeatState = Literal["absent", "loading", "ready", "lost"]

log = get_logger("coordinator.set")


@dataclass(slots=True)
class Seat:
    """A place on the grid and who fills it."""

    rank: int
    state: SeatState = "absent"
    link: RankLink | None = None
    fenced_reason: str = ""
    last_instance: str = ""
    last_pid: int = 0


class RankSet:
    """Seats, epoch and engine of one DP index.

    Until it has been ready once, every failure is the cluster's failure and goes to `on_fatal`. Afterwards a lost rank
    raises the epoch, ends the set's requests with UNAVAILABLE, and the set serves again under the new epoch once all seats
    are filled. `on_change` is called whenever a seat or the set's readiness changes.
    """

    def __init__(
        self,
        spec: SchedulingSet,
        config: common_pb2.ClusterConfig,
        new_engine: Callable[[SchedulingSet, int], Engine],
        timings: Timings,
        on_change: Callable[[], None],
        on_fatal: Callable[[KvloomError], None],
    ) -> None:
        self.spec = spec
        self.seats = {rank: Seat(rank) for rank in spec.ranks}
        self.epoch = 1
        self.ready = False
        self.engine: Engine | None = None
        self._config = config
        self._new_engine = new_engine
        self._timings = timings
        self._on_change = on_change
        self._on_fatal = on_fatal
        self._was_ready = False
        self._pool_blocks = 0
        self._break_reason = ""
        self._lost = asyncio.Event()
        """A rank was lost since the session began."""
        self._session: asyncio.Task[None] | None = None
        self._seats_changed = asyncio.Event()
        self._closing = Background(lambda name, error: None)

    @property
    def pool_blocks(self) -> int:
        """Blocks of every rank's pool; 0 before the pools exist."""
        return self._pool_blocks

    @property
    def serving(self) -> Engine:
        """The engine, of a set that has served; RuntimeError before that."""
        if self.engine is None:
            raise RuntimeError(f"{self.spec.name} has not served yet")
        return self.engine

    @property
    def links(self) -> dict[int, RankLink]:
        """Ranks that are here, ascending."""
        return {rank: seat.link for rank, seat in self.seats.items() if seat.link is not None}

    def join(self, registration: coordinator_pb2.RegisterRequest) -> None:
        """Seats a rank and has it load its weights; `Duplicate` while another process fills the seat.

        `ConfigRefused` for a rank on another host than the set's other ranks, when they share memory.
        """
        seat = self.seats[registration.rank]
        if seat.link is not None:
            raise Duplicate(f"rank {seat.rank} is already here, as process {seat.link.pid}")
        if self._config.collectives == "shm":
            self._check_host(registration)
        link = RankLink(registration, self.epoch, self._lose)
        seat.link, seat.state, seat.fenced_reason = link, "loading", ""
        seat.last_instance, seat.last_pid = link.instance, link.pid
        log.info("rank joined", rank=seat.rank, instance=link.instance, pid=link.pid)
        link.background.spawn(self._load(link), "loading")
        link.background.spawn(self._watch(link), "watching")
        self._on_change()

    def refuse(self, refusal: KvloomError) -> None:
        """A process that does not fit asked for a seat: before the first start this means that the cluster can't start."""
        if not self._was_ready:
            self._on_fatal(refusal)

    def _check_host(self, registration: coordinator_pb2.RegisterRequest) -> None:
        others = [seat.link for seat in self.seats.values() if seat.link is not None]
        strangers = [link.rank for link in others if link.host != registration.host]
        if strangers or not registration.host:
            whom = f"rank {strangers[0]}" if strangers else "any other"
            refusal = ConfigRefused(f"rank {registration.rank} shares no memory with {whom}, which collectives shm need")
            self.refuse(refusal)
            raise refusal

    def fence(self, link: RankLink, reason: str) -> None:
        """Treats a rank as lost that answers, but not what it is asked; nothing happens if it is lost already."""
        self._lose(link, reason)

    async def run(self) -> None:
        """Serves, epoch after epoch, until cancelled or until a first start fails."""
        openings = 0
        while True:
            while not all(seat.link is not None and seat.link.configured for seat in self.seats.values()):
                self._seats_changed.clear()
                await self._seats_changed.wait()
            self._break_reason = ""
            self._lost.clear()
            self._session = asyncio.create_task(self._serve(), name=self.spec.name)
            try:
                await asyncio.wait({self._session})
            except asyncio.CancelledError:
                self._session.cancel()
                await asyncio.wait({self._session})
                raise
            was_open, self.ready = self.ready, False
            openings = 0 if was_open else openings + 1
            fault = None if self._session.cancelled() else self._session.exception()
            await self._wait_for_cause(fault)
            if not self._end_session(fault, fence=not was_open and openings >= MAX_OPENINGS):
                return
            if openings:
                await asyncio.sleep(self._timings.retry_s)

    async def stop(self, error: KvloomError) -> None:
        """Ends all requests and closes all lanes: the ranks exit."""
        self.ready = False
        if self.engine is not None:
            self.engine.fail_all(error)
        for seat in self.seats.values():
            link, seat.link = seat.link, None
            if link is not None:
                await link.close("the coordinator stops")
        await self._closing.cancel()

    async def _load(self, link: RankLink) -> None:
        try:
            await bring_up.configure(link, self.spec, self._config, self._pool_blocks > 0, self._timings)
        except RankFault as fault:
            self._lose(link, fault.what, fault)
            return
        log.info("rank loaded its weights", rank=link.rank)
        self._seats_changed.set()

    async def _watch(self, link: RankLink) -> None:
        reason = await watch(link, self._timings)
        self._lose(link, reason)

    async def _serve(self) -> None:
        links = self.links
        first_time = self.engine is None
        if self.engine is None:
            room = {rank: link.configured.max_kv_blocks for rank, link in links.items() if link.configured is not None}
            self._pool_blocks = bring_up.pool_blocks(self._config, room)
            self.engine = self._new_engine(self.spec, self._pool_blocks)
            # A rank that comes later must plan for the pool the set has, whatever memory is free then.
            self._config = _with_pool(self._config, self._pool_blocks)
        await bring_up.allocate(list(links.values()), self._pool_blocks, self._timings)
        for link in links.values():
            link.lane.epoch = self.epoch
        if not first_time:
            await bring_up.reset(list(links.values()), self._timings)
        await bring_up.open_groups(self.spec.groups, links, self._timings)
        await self._measure(self.engine, links)
        for seat in self.seats.values():
            seat.state = "ready"
        self.ready = self._was_ready = True
        log.info("set serves", set=self.spec.name, epoch=self.epoch, blocks=self._pool_blocks)
        self._on_change()
        await self.engine.run([link.lane for link in links.values()])

    async def _measure(self, engine: Engine, links: Mapping[int, RankLink]) -> None:
        """Once: later steps say more than another measurement would."""
        group = self.spec.replica_group
        if group is None or engine.pricing.link is not None:
            return
        link = await measure(group, self.spec.groups[group], links, self._timings)
        if link is not None:
            engine.pricing.take_link(link)
            log.info("link measured", set=self.spec.name, group=group, latency_s=link.latency_s, s_per_byte=link.s_per_byte)

    async def _wait_for_cause(self, fault: BaseException | None) -> None:
        """Survivors of a lost rank may say so before its lane ends: the one to name is the lost one."""
        if isinstance(fault, CommandFailed) and fault.reason == COLLECTIVE_FAILED:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), self._timings.cause_s)

    def _end_session(self, fault: BaseException | None, fence: bool) -> bool:
        """Draws the conclusions from a session's end; False when there will be no other.

        fence: the rank at fault has been given enough chances.
        """
        detail = f"rank {fault.rank}: {fault.detail}" if isinstance(fault, RankFault) else str(fault)
        if not self._was_ready:
            self._on_fatal(fault if isinstance(fault, KvloomError) else start_failure(self._break_reason or detail, fault))
            return False
        reason = self._break_reason or _public(fault)
        log.warning("set broken", set=self.spec.name, epoch=self.epoch, reason=reason, fault=detail)
        self.epoch += 1
        if self.engine is not None:
            self.engine.fail_all(Unavailable(f"the request was lost: {reason}", retry_after_s=self._timings.retry_s))
        for seat in self.seats.values():
            if seat.link is not None:
                # Behind a lost member, a survivor's collective ends at its own time-out.
                seat.link.lane.tolerate_stalls(self._timings.command_s)
        if fault is not None and not isinstance(fault, RankFault):
            log.error("unexpected failure of a set", exc=fault, set=self.spec.name)
        if isinstance(fault, CommandTimedOut) or (isinstance(fault, RankFault) and fence and not self._break_reason):
            self._lose_rank(fault)
        self._on_change()
        return True

    def _lose_rank(self, fault: RankFault) -> None:
        link = self.seats[fault.rank].link
        if link is not None:
            self._lose(link, fault.what, fault)

    def _lose(self, link: RankLink, reason: str, fault: RankFault | None = None) -> None:
        """Fences a rank's process: it is no longer spoken to, whatever it does. Nothing happens if it already was."""
        seat = self.seats[link.rank]
        if seat.link is not link:
            return
        detail = fault.detail if fault is not None else reason
        seat.link, seat.state, seat.fenced_reason = None, "lost", detail
        log.warning("rank lost", rank=seat.rank, instance=link.instance, reason=detail)
        self._closing.spawn(link.close(reason), f"closing rank {seat.rank}")
        self._break_reason = self._break_reason or f"rank {seat.rank}: {reason}"
        self._lost.set()
        if self._session is not None:
            self._session.cancel()
        if not self._was_ready:
            self._on_fatal(start_failure(f"rank {seat.rank}: {detail}", fault))
        self._on_change()


def _public(fault: BaseException | None) -> str:
    """What clients are told: a text that is not ours may hold paths and addresses."""
    return str(fault) if isinstance(fault, RankFault) else f"internal error ({type(fault).__name__})"


def _with_pool(config: common_pb2.ClusterConfig, blocks: int) -> common_pb2.ClusterConfig:
    settled = common_pb2.ClusterConfig()
    settled.CopyFrom(config)
    settled.kv_cache_tokens_per_rank = blocks * config.block_size
    settled.kv_cache_memory_bytes = 0
    return settled
