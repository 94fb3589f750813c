"""The coordinator, put together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from coordinator.admission import Admission
from coordinator.choice import GATHERS, Replicas, computable
from coordinator.cluster import SchedulingSet, scheduling_sets
from coordinator.control_service import ControlServicer
from coordinator.dispatch import Dispatcher
from coordinator.engine import Engine
from coordinator.faults import StartFailed
from coordinator.inference_service import InferenceServicer
from coordinator.limits import Limits
from coordinator.predict import StepPredictor, layer_parameters, prior_seconds_per_token
from coordinator.pricing import Pricing
from coordinator.rank_set import RankSet
from coordinator.registry import RegistryServicer
from coordinator.scheduler import Scheduler, SchedulerConfig
from coordinator.seeds import SeedSource
from coordinator.settings import MAX_WAITING
from coordinator.status import cluster_state, cluster_status
from coordinator.tasks import Background, Changes
from coordinator.text_worker import Text, TextWorker
from coordinator.timings import Timings
from cp_layout.blocks import BlockHasher, cache_identity
from cp_layout.cost import CostModel
from cp_layout.model_shape import ModelShape
from cp_wire.effective import grid_of, layout_of
from cp_wire.errors import KvloomError, Unavailable
from cp_wire.pb import common_pb2, coordinator_pb2, coordinator_pb2_grpc
from cp_wire.serve import Server


@dataclass(frozen=True, slots=True)
class Options:
    """What is the process's own business and no rank's."""

    host: str = "127.0.0.1"
    port: int = 0
    seed: int | None = None
    max_waiting: int = MAX_WAITING


class Coordinator:
    """Server, sets and admission. Use `running`; `config` is the effective configuration, already checked."""

    def __init__(
        self, config: common_pb2.ClusterConfig, shape: ModelShape, text: Text, options: Options, timings: Timings
    ) -> None:
        self._config = config
        self._shape = shape
        self._timings = timings
        self._max_waiting = options.max_waiting
        self._layout = layout_of(config)
        self._identity = cache_identity(
            {"model_hash": config.model_hash, "dtype": config.dtype, "kv_cache_dtype": config.kv_cache_dtype}
        )
        self._eos_token_ids = text.eos_token_ids
        self._text = TextWorker(text, timings.encode_s)
        self._dispatcher = Dispatcher()
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._started = asyncio.Event()
        self._background = Background(lambda name, error: self._fail(StartFailed(f"{name} failed ({type(error).__name__})")))
        self.changes = Changes()
        self.sets = [
            RankSet(spec, config, self._new_engine, timings, self._on_change, self._fail)
            for spec in scheduling_sets(grid_of(config))
        ]
        self.admission = Admission(
            self.sets, self._limits, self._hasher, self._text, config.model_name, SeedSource(options.seed), count(1)
        )
        by_rank = {rank: home for home in self.sets for rank in home.seats}
        self._registry = RegistryServicer(config, by_rank)
        control = ControlServicer(self.status, self.effective_config, self.drain, self.changes)
        inference = InferenceServicer(self.admission, self._layout.num_shards)
        self._server = Server(options.host, options.port, "prompt")
        for add, servicer, name in (
            (coordinator_pb2_grpc.add_InferenceServiceServicer_to_server, inference, "InferenceService"),
            (coordinator_pb2_grpc.add_ControlServiceServicer_to_server, control, "ControlService"),
            (coordinator_pb2_grpc.add_RegistryServiceServicer_to_server, self._registry, "RegistryService"),
        ):
            self._server.add(add, servicer, f"kvloom.v1.{name}")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Listens and yields HOST:PORT; stops everything at the end. Raises PortInUse."""
        address = await self._server.start()
        for home in self.sets:
            self._background.spawn(home.run(), f"set {home.spec.index}")
        try:
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
        return cluster_status(self.sets, self.effective_config(), state, self._layout, last_steps)

    def effective_config(self) -> common_pb2.ClusterConfig:
        """The configuration in force; once the pools exist it states their size."""
        config = common_pb2.ClusterConfig()
        config.CopyFrom(self._config)
        blocks = [home.pool_blocks for home in self.sets]
        if all(blocks):
            config.kv_cache_tokens_per_rank = min(blocks) * config.block_size
        return config

    def _new_engine(self, spec: SchedulingSet, pool_blocks: int) -> Engine:
        config = self._config
        bounds = SchedulerConfig(config.max_num_seqs, config.max_num_batched_tokens, self._max_waiting)
        predictor = StepPredictor(prior_seconds_per_token(self._shape, config.tp))
        latent = self._shape.mla is not None
        gather = GATHERS[config.pcp_gather if config.mla_gather == "auto" else config.mla_gather]
        replicas = Replicas(config.pcp, config.dcp, computable(latent), gather, latent)
        parameters = layer_parameters(self._shape)
        pricing = Pricing(CostModel.of(self._shape, grid_of(config), parameters, config.dtype, config.kv_cache_dtype))
        scheduler = Scheduler(bounds, self._layout, pool_blocks, self._identity, replicas, pricing)
        return Engine(scheduler, spec.members, self._dispatcher, self._text, predictor, self._timings, pricing)

    def _hasher(self, salt: bytes) -> BlockHasher:
        return BlockHasher(self._layout, self._identity, salt)

    def _limits(self, home: RankSet) -> Limits:
        return Limits(
            max_model_len=self._config.max_model_len,
            vocab_size=self._shape.vocab_size,
            layout=self._layout,
            blocks_per_member=home.pool_blocks,
            eos_token_ids=self._eos_token_ids,
        )

    def _on_change(self) -> None:
        if all(home.ready for home in self.sets):
            self._started.set()
        self._server.set_serving(any(home.ready for home in self.sets) and not self.admission.closed)
        self.changes.announce()

    def _fail(self, error: KvloomError) -> None:
        if not self._fatal.done():
            self._fatal.set_exception(error)

    async def _stop(self) -> None:
        self.admission.closed = True
        self._registry.open = False
        error = Unavailable("the server is shutting down")
        self.admission.end_all(error)
        await self._background.cancel()
        for home in self.sets:
            await home.stop(error)
        await self._server.stop(self._timings.stop_s)
        self._text.close()
        if not self._fatal.cancel() and not self._fatal.cancelled():
            # Whoever waits has seen it; a process that stops for another reason has no use for it.
            self._fatal.exception()
