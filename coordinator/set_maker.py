"""What the sets of one side are made of."""

from collections.abc import Callable

from coordinator.choice import GATHERS, LATENT_GATHERS, Replicas, computable
from coordinator.cluster import DECODE, SchedulingSet, scheduling_sets
from coordinator.dispatch import Dispatcher
from coordinator.engine import Engine
from coordinator.predict import StepPredictor, layer_parameters, prior_seconds_per_pair, prior_seconds_per_token
from coordinator.pricing import Pricing
from coordinator.runs import MAX_AHEAD
from coordinator.scheduler import Scheduler, SchedulerConfig
from coordinator.text_worker import TextWorker
from coordinator.timings import Timings
from cp_layout.blocks import BlockHasher, cache_identity
from cp_layout.cost import CostModel
from cp_layout.model_shape import ModelShape
from cp_wire.effective import grid_of
from cp_wire.pb import common_pb2
from cp_wire.sides import Side

MERGE_ROUNDS = {common_pb2.MERGE_A2A: 1, common_pb2.MERGE_AG_RS: 2}
"""Collectives that bring partial attention back, by merge."""


def cost_model(shape: ModelShape, config: common_pb2.ClusterConfig) -> CostModel:
    """Of the sets of a side with this configuration; `LayoutError` for a grid or a dtype that there isn't."""
    parameters, rounds = layer_parameters(shape), MERGE_ROUNDS[config.merge]
    return CostModel.of(shape, grid_of(config), parameters, config.dtype, config.kv_cache_dtype, rounds)


class SetMaker:
    """Makes engines for the sets of a side, and hashers for its prefix caches. before_step: see `Engine`, by set."""

    def __init__(
        self,
        side: Side,
        shape: ModelShape,
        dispatcher: Dispatcher,
        text: TextWorker,
        timings: Timings,
        max_waiting: int,
        before_step: Callable[[SchedulingSet], Callable[[], None]],
    ) -> None:
        self.side = side
        self.layout = side.layout
        self._shape = shape
        self._dispatcher = dispatcher
        self._text = text
        self._timings = timings
        self._max_waiting = max_waiting
        self._before_step = before_step
        config = side.config
        self._identity = cache_identity(
            {"model_hash": config.model_hash, "dtype": config.dtype, "kv_cache_dtype": config.kv_cache_dtype}
        )

    def specs(self) -> tuple[SchedulingSet, ...]:
        """The side's sets."""
        return scheduling_sets(self.side.grid, self.side.role, self.side.first_rank)

    def engine(self, spec: SchedulingSet, pool_blocks: int) -> Engine:
        """An engine for one of them."""
        config = self.side.config
        bounds = SchedulerConfig(config.max_num_seqs, config.max_num_batched_tokens, self._max_waiting, MAX_AHEAD)
        latent = self._shape.mla is not None
        gather = LATENT_GATHERS.get(config.mla_gather, GATHERS[config.pcp_gather])
        replicas = Replicas(config.pcp, config.dcp, computable(latent), gather, latent)
        model = cost_model(self._shape, config)
        predictor = StepPredictor(prior_seconds_per_token(self._shape, config.tp), prior_seconds_per_pair(model))
        pricing = Pricing(model)
        scheduler = Scheduler(bounds, self.layout, pool_blocks, self._identity, replicas, pricing)
        before_step = self._before_step(spec) if spec.role == DECODE else lambda: None
        return Engine(scheduler, spec.members, self._dispatcher, self._text, predictor, self._timings, pricing, before_step)

    def hasher(self, salt: bytes) -> BlockHasher:
        """Names a tenant's blocks."""
        return BlockHasher(self.layout, self._identity, salt)
