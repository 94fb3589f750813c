"""The coordinator, put together."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from coordinator.admission import Admission
from coordinator.cluster import SchedulingSet
from coordinator.control_service import ControlServicer
from coordinator.dispatch import Dispatcher
from coordinator.faults import StartFailed
from coordinator.handover import Handover
from coordinator.inference_service import InferenceServicer
from coordinator.limits import Limits
from coordinator.rank_set import RankSet
from coordinator.registry import RegistryServicer
from coordinator.seeds import SeedSource
from coordinator.set_maker import SetMaker
from coordinator.settings import MAX_WAITING
from coordinator.status import View, cluster_state, cluster_status
from coordinator.tasks import Background, Changes
from coordinator.text_rows import LiveRequest
from coordinator.text_worker import Text, TextWorker
from coordinator.timings import Timings
from cp_layout.capacity import group_capacity_tokens
from cp_layout.model_shape import ModelShape
from cp_wire.errors import KvloomError, Unavailable
from cp_wire.logs import get_logger
from cp_wire.metrics import families
from cp_wire.metrics_server import MetricsServer
from cp_wire.pb import common_pb2, coordinator_pb2, coordinator_pb2_grpc
from cp_wire.serve import Server
from cp_wire.sides import Side

log = get_logger("coordinator")


@dataclass(frozen=True, slots=True)
class Options:
    """What is the process's own business and no rank's."""

    host: str = "127.0.0.1"
    port: int = 0
    seed: int | None = None
    max_waiting: int = MAX_WAITING
    recompute_lost_kv: bool = True
    """Whether a request whose KV can't be moved is computed where its output is; else it fails."""
    metrics_port: int = 0
    """Where metrics are served on `host`; 0 = nowhere."""


class Coordinator:
    """Server, sets and admission. Use `running`; `sides` have effective configurations, already checked: one side, or two,
    prefill first."""

    def __init__(self, sides: Sequence[Side], shape: ModelShape, text: Text, options: Options, timings: Timings) -> None:
        self._shape = shape
        self._timings = timings
        self._eos_token_ids = text.eos_token_ids
        self._text = TextWorker(text, timings.encode_s)
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._started = asyncio.Event()
        self._background = Background(self._died)
        self.changes = Changes()
        dispatcher = Dispatcher()
        self._makers = [
            SetMaker(side, shape, dispatcher, self._text, timings, options.max_waiting, lambda spec: partial(self._pump, spec))
            for side in sides
        ]
        by_maker = [
            [RankSet(spec, maker.side.config, maker.engine, timings, self._on_change, self._fail) for spec in maker.specs()]
            for maker in self._makers
        ]
        self.sets = [home for homes in by_maker for home in homes]
        self._homes = by_maker[-1]
        """Sets that compute outputs: those that requests belong to."""
        self.handover: Handover | None = None
        if len(sides) > 1:
            self.handover = Handover(
                by_maker[0],
                {side.role: side for side in sides},
                options.recompute_lost_kv,
                options.max_waiting,
                timings,
                self._died,
            )
        self.admission = Admission(
            self._homes,
            self._submit,
            self._limits,
            lambda salt: [maker.hasher(salt) for maker in reversed(self._makers)],
            self._text,
            sides[-1].config.model_name,
            SeedSource(options.seed),
            count(1),
        )
        # Without the other side the first prompts would be computed on the wrong one, or judged by the wrong limits.
        self.admission.complete = self.handover is None
        self._by_rank = {rank: home for home in self.sets for rank in home.seats}
        self._registry = RegistryServicer(sides[0].config, self._by_rank)
        control = ControlServicer(self.status, self.effective_config, self.drain, self.changes)
        self._inference = InferenceServicer(self.admission, self._makers[-1].layout.num_shards)
        self._server = Server(options.host, options.port, "prompt")
        port = options.metrics_port
        self._metrics = MetricsServer(options.host, port, lambda: families(self.status())) if port else None
        for add, servicer, name in (
            (coordinator_pb2_grpc.add_InferenceServiceServicer_to_server, self._inference, "InferenceService"),
            (coordinator_pb2_grpc.add_ControlServiceServicer_to_server, control, "ControlService"),
            (coordinator_pb2_grpc.add_RegistryServiceServicer_to_server, self._registry, "RegistryService"),
        ):
            self._server.add(add, servicer, f"kvloom.v1.{name}")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Listens and yields HOST:PORT; stops everything at the end. Raises PortInUse."""
        address = await self._server.start()
        try:
            if self._metrics is not None:
                log.info("metrics are served", address=await self._metrics.start())
            for home in self.sets:
                self._background.spawn(home.run(), home.spec.name)
            yield address
        finally:
            await self._stop()

    async def ready(self) -> None:
        """Returns when all sets serve for the first time; raises why they can't, at the latest after `start_s`."""
        started: asyncio.Future[Any] = asyncio.ensure_future(self._started.wait())
        try:
            await asyncio.wait({started, self._fatal}, timeout=self._timings.start_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            started.cancel()
        if self._fatal.done():
            self._fatal.result()
        if not self._started.is_set():
            late = [f"rank {seat.rank} is {seat.state}" for home in self.sets for seat in home.seats.values()]
            late = [sentence for sentence in late if not sentence.endswith(" ready")]
            raise StartFailed(f"not ready after {self._timings.start_s:g} s: {', '.join(late)}")

    async def failed(self) -> None:
        """Waits for ever, unless something fails that the process can't survive: raises it."""
        await asyncio.shield(self._fatal)

    async def drain(self, deadline_s: float) -> int:
        """Stops admission for good, waits for the accepted requests, ends the rest; returns how many those were."""
        self.admission.closed = True
        self._on_change()
        seen = -1
        try:
            async with asyncio.timeout(deadline_s):
                while self.admission.active:
                    seen = await self.admission.changes.beyond(seen)
        except TimeoutError:
            return self.admission.end_all(Unavailable("the server is shutting down"))
        return 0

    def status(self, last_steps: int = 0) -> coordinator_pb2.GetStatusResponse:
        """A snapshot; last_steps: what its step times are taken over, 0 = all that are remembered."""
        state = cluster_state(self.sets, self._started.is_set(), self.admission.closed)
        configs = [self._in_force(maker, self._sets_of(maker)) for maker in self._makers]
        view = View(
            sets=self.sets,
            homes=self._homes,
            sides=[(maker.side.role, config) for maker, config in zip(self._makers, configs, strict=True)],
            prompts=self._makers[0].layout,
            outputs=self._makers[-1].layout,
            handover=self.handover,
            requests=self._inference.stats,
        )
        return cluster_status(view, state, last_steps)

    def effective_config(self) -> common_pb2.ClusterConfig:
        """The configuration in force, of the sets that compute outputs; once the pools exist it states their size."""
        return self._in_force(self._makers[-1], self._homes)

    def _sets_of(self, maker: SetMaker) -> list[RankSet]:
        return [home for home in self.sets if home.spec.role == maker.side.role]

    def _in_force(self, maker: SetMaker, sets: Sequence[RankSet]) -> common_pb2.ClusterConfig:
        config = common_pb2.ClusterConfig()
        config.CopyFrom(maker.side.config)
        blocks = [home.pool_blocks for home in sets]
        if all(blocks):
            config.kv_cache_tokens_per_rank = min(blocks) * config.block_size
        return config

    def _submit(self, home: RankSet, lives: Sequence[LiveRequest]) -> None:
        if self.handover is None:
            home.serving.submit(*lives)
        else:
            self.handover.submit(home, lives)

    def _pump(self, spec: SchedulingSet) -> None:
        if self.handover is not None:
            self.handover.pump(self._by_rank[spec.ranks[0]])

    def _limits(self, home: RankSet) -> Limits:
        return Limits(
            max_model_len=self._makers[-1].side.config.max_model_len,
            vocab_size=self._shape.vocab_size,
            layout=self._makers[-1].layout,
            blocks_per_member=home.pool_blocks,
            eos_token_ids=self._eos_token_ids,
            max_prompt=self._max_prompt,
        )

    @property
    def _max_prompt(self) -> int | None:
        """Tokens that the ranks which compute prompts can hold, where they are other ranks."""
        if self.handover is None:
            return None
        blocks = [home.pool_blocks for home in self._sets_of(self._makers[0]) if home.pool_blocks]
        return group_capacity_tokens(self._makers[0].layout, min(blocks)) if blocks else None

    def _on_change(self) -> None:
        if all(home.ready for home in self.sets):
            self._started.set()
            self.admission.complete = True
        open_ = self.admission.complete and not self.admission.closed
        self._server.set_serving(open_ and any(home.ready for home in self._homes))
        self.changes.announce()

    def _died(self, name: str, error: Exception) -> None:
        self._fail(StartFailed(f"{name} failed ({type(error).__name__})"))

    def _fail(self, error: KvloomError) -> None:
        if not self._fatal.done():
            self._fatal.set_exception(error)

    async def _stop(self) -> None:
        self.admission.closed = True
        self._registry.open = False
        error = Unavailable("the server is shutting down")
        self.admission.end_all(error)
        await self._background.cancel()
        if self.handover is not None:
            await self.handover.close()
        for home in self.sets:
            await home.stop(error)
        await self._server.stop(self._timings.stop_s)
        if self._metrics is not None:
            await self._metrics.stop()
        self._text.close()
        if not self._fatal.cancel() and not self._fatal.cancelled():
            # Whoever waits has seen it; a process that stops for another reason has no use for it.
            self._fatal.exception()
