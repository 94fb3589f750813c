"""What a rank does for each command of its lane. Runs on the worker thread only; knows nothing of gRPC calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cp_layout.cuts import kv_head_cut
from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.laws import check_config
from cp_wire.pb import common_pb2, rank_pb2
from model_files import ModelFiles
from rank_server.attention.dcp_gqa import DcpAttention
from rank_server.collectives.base import Backend, Group
from rank_server.collectives.solo import SoloGroup
from rank_server.draws import answer
from rank_server.kv_pool import KvPool
from rank_server.memory import available_bytes, max_kv_blocks
from rank_server.models.table import build_model, load_weights
from rank_server.penalties import TokenHistory
from rank_server.sequences import PlanRefused, SequenceTable
from rank_server.step_batch import StepBatch, build, commit, keep_history, no_history, take_in

if TYPE_CHECKING:
    from rank_server.models.decoder import DecoderModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_MERGES = {common_pb2.MERGE_A2A: "a2a", common_pb2.MERGE_AG_RS: "ag_rs"}


class ConfigRefused(ValueError):
    """The rank can't serve this configuration; the message names the setting."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rank stands: the effective configuration and everything that follows from it alone."""

    rank: int
    config: common_pb2.ClusterConfig
    grid: Grid
    layout: Layout
    member: int
    tp_index: int
    pcp_index: int

    @classmethod
    def of(cls, config: common_pb2.ClusterConfig, rank: int) -> "Place":
        """Derives the place of a global rank; raises `ConfigRefused` for a rank outside the grid."""
        grid = Grid(tp=config.tp, pcp=config.pcp, dcp=config.dcp, dp=config.dp)
        if rank >= grid.world_size:
            raise ConfigRefused(f"rank {rank} does not exist in a world of {grid.world_size} ranks")
        layout = Layout(num_shards=config.dcp, interleave=config.interleave, block_size=config.block_size)
        coords = grid.coords(rank)
        return cls(rank, config, grid, layout, grid.dcp_member(rank), coords.tp, coords.pcp)

    def group_name(self, kind: str) -> str:
        """Name of the rank's group of a kind: "tp", "q" or "dcp"."""
        groups = {"tp": self.grid.tp_groups, "q": self.grid.q_groups, "dcp": self.grid.dcp_groups}[kind]()
        return next(f"{kind}:{i}" for i, ranks in enumerate(groups) if self.rank in ranks)


class Executor:
    """Model, pool, groups and requests of one rank.

    `backends` maps the names of collective backends to implementations; `progress` is called whenever a long command has
    got further.
    """

    def __init__(
        self,
        model_files: ModelFiles,
        backends: Mapping[str, Callable[[], Backend]],
        progress: Callable[[], None],
        ranks_on_host: int = 1,
    ) -> None:
        self._files = model_files
        self._backends = backends
        self._progress = progress
        self._ranks_on_host = ranks_on_host
        self._backend: Backend | None = None
        self._place: Place | None = None
        self._weights: Mapping[str, torch.Tensor] = {}
        self._pool: KvPool | None = None
        self._groups: dict[str, Group] = {}
        self._model: DecoderModel | None = None
        self._attention: DcpAttention | None = None
        self._sequences = SequenceTable()

    @property
    def pool(self) -> KvPool:
        """The KV pool; `PlanRefused` before it is allocated."""
        if self._pool is None:
            raise PlanRefused("the KV pool is not allocated yet")
        return self._pool

    @property
    def place(self) -> Place:
        """The rank's place; `PlanRefused` before it is configured."""
        if self._place is None:
            raise PlanRefused("the rank is not configured yet")
        return self._place

    def configure(self, config: common_pb2.ClusterConfig, rank: int) -> rank_pb2.Configured:
        """Loads the rank's slice of the weights and says how large a pool it can hold."""
        shape = self._files.shape
        if self._place is not None:
            raise ConfigRefused("the rank is configured already")
        if config.dtype not in DTYPES or config.kv_cache_dtype not in DTYPES:
            raise ConfigRefused(f"dtype {config.dtype!r} / KV dtype {config.kv_cache_dtype!r} is not one of {sorted(DTYPES)}")
        if config.q_replicate:
            raise ConfigRefused("replicated query projections are not supported")
        if config.collectives not in self._backends:
            raise ConfigRefused(f"collectives {config.collectives!r} is not one of {sorted(self._backends)}")
        place = Place.of(config, rank)
        check_config(place.grid, place.layout, shape.num_heads, shape.num_kv_heads)
        self._backend = self._backends[config.collectives]()
        self._weights = load_weights(
            self._files, place.grid.tp, place.tp_index, DTYPES[config.dtype], lambda done, total: self._progress()
        )
        bytes_per_block = shape.kv_bytes_per_token(config.tp, config.kv_cache_dtype) * config.block_size
        blocks = max_kv_blocks(config, bytes_per_block, available_bytes(), self._ranks_on_host)
        self._place = place
        return rank_pb2.Configured(
            config=config,
            max_kv_blocks=blocks,
            kv_bytes_per_block=bytes_per_block,
            weight_bytes=sum(tensor.nbytes for tensor in self._weights.values()),
        )

    def allocate_pool(self, num_blocks: int) -> rank_pb2.PoolAllocated:
        """Creates the pool; all ranks of a set get the same number of blocks."""
        shape, place = self._files.shape, self.place
        if self._pool is not None:
            raise PlanRefused("the KV pool is allocated already")
        first, last = kv_head_cut(shape.num_kv_heads, place.grid.tp, place.tp_index)
        self._pool = KvPool(
            num_layers=shape.num_layers,
            num_blocks=num_blocks,
            block_size=place.config.block_size,
            num_kv_heads=last - first,
            head_dim=shape.head_dim,
            dtype=DTYPES[place.config.kv_cache_dtype],
            device=torch.device("cpu"),
        )
        return rank_pb2.PoolAllocated(num_blocks=num_blocks, bytes=num_blocks * self._pool.bytes_per_block)

    def prepare_group(self, name: str, ranks: Sequence[int]) -> rank_pb2.GroupPrepared:
        """Bootstrap bytes for a group of which this rank is member 0."""
        return rank_pb2.GroupPrepared(bootstrap=self._require_backend().prepare(name, ranks))

    def open_group(self, name: str, ranks: Sequence[int], bootstrap: bytes, timeout_s: float) -> rank_pb2.GroupOpened:
        """Joins a group; waits for its members."""
        if name in self._groups:
            raise PlanRefused(f"group {name} is open already")
        self._groups[name] = self._require_backend().open(name, ranks, self.place.rank, bootstrap, timeout_s)
        self._model = self._attention = None
        return rank_pb2.GroupOpened()

    def reset(self) -> rank_pb2.ResetDone:
        """Forgets all requests and leaves all groups; weights and pool stay."""
        self.close_groups()
        self._groups.clear()
        self._model = self._attention = None
        self._sequences.clear()
        return rank_pb2.ResetDone()

    def close_groups(self) -> None:
        """Leaves all groups without waiting for anybody; may be called from another thread to interrupt a collective."""
        for group in list(self._groups.values()):
            group.close()

    def step(self, plan: rank_pb2.StepPlan) -> rank_pb2.StepResult:
        """One forward pass. Collectives fail after the plan's timeout; a failure leaves the rank to be reset."""
        place, pool = self.place, self.pool
        if plan.decode_mode != common_pb2.DECODE_MODE_REPLICATED or plan.gather != common_pb2.GATHER_NONE:
            raise PlanRefused(f"decode mode {plan.decode_mode} with gather {plan.gather} is not supported")
        for group in self._groups.values():
            group.set_timeout(plan.timeout_ms / 1000)
        calls_before = sum(group.calls for group in self._groups.values())
        take_in(plan, self._sequences, place.layout, place.member, self._history_of if self._samples else no_history)
        result = rank_pb2.StepResult()
        if plan.rows:
            batch = build(plan, self._sequences, place.layout, place.member)
            result = self._forward(batch, pool)
            commit(plan, self._sequences)
        result.ticket = plan.ticket
        result.blocks_in_use = self._sequences.blocks_in_use
        result.collectives = sum(group.calls for group in self._groups.values()) - calls_before
        return result

    @torch.inference_mode()
    def _forward(self, batch: StepBatch, pool: KvPool) -> rank_pb2.StepResult:
        place = self.place
        model, attention = self._assemble(pool)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self._progress()
            return attention.forward(layer, q, k, v, batch.attention)

        hidden = model.forward(batch.token_ids, batch.positions, attend)
        # Every replica holds the same hidden states; the first one draws, the other replicas skip the vocabulary.
        if place.pcp_index != 0:
            return rank_pb2.StepResult()
        return answer(batch, hidden, model.logits, self._files.shape.vocab_size, self._samples, self._progress)

    @property
    def _samples(self) -> bool:
        """Whether this rank draws for its set: TP member 0 of the first replica."""
        return self.place.tp_index == 0 and self.place.pcp_index == 0

    def _history_of(self, admitted: rank_pb2.AdmittedRequest) -> TokenHistory | None:
        return keep_history(admitted, self._files.shape.vocab_size, torch.device("cpu"))

    def _assemble(self, pool: KvPool) -> "tuple[DecoderModel, DcpAttention]":
        if self._model is None or self._attention is None:
            place, shape = self.place, self._files.shape
            self._model = build_model(shape, self._weights, self._group("tp"), DTYPES[place.config.dtype])
            self._attention = DcpAttention(
                pool,
                q_group=self._group("q"),
                dcp_group=self._group("dcp"),
                merge=_MERGES[place.config.merge],
                scale=shape.head_dim**-0.5,
                pcp=1 if place.grid.dcp == 1 else place.grid.pcp,
            )
        return self._model, self._attention

    def _group(self, kind: str) -> Group:
        place = self.place
        size = {"tp": place.grid.tp, "q": place.grid.dcp_in_tp, "dcp": place.grid.dcp}[kind]
        name = place.group_name(kind)
        if size == 1:
            return SoloGroup(name)
        if name not in self._groups:
            raise PlanRefused(f"group {name} of {size} ranks is not open")
        return self._groups[name]

    def _require_backend(self) -> Backend:
        if self._backend is None:
            raise PlanRefused("the rank is not configured yet")
        return self._backend
