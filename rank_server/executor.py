"""What a rank does for each command of its lane. Runs on the worker thread only; knows nothing of gRPC calls."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from cp_layout.reorg import WORKSPACE_BYTES
from cp_wire.errors import ConfigRefused
from cp_wire.host_memory import PoolRefused, available_bytes, max_kv_blocks
from cp_wire.pb import common_pb2, rank_pb2
from kv_transfer.shared_memory import SharedPool
from model_files import ModelFiles
from rank_server.attention.kernels import kernels_for
from rank_server.collectives.base import Backend
from rank_server.device import POOL_SHARE, free_bytes, room_on
from rank_server.draws import answer
from rank_server.flows.replicated import ReplicatedFlow
from rank_server.flows.table import Ways, check_way
from rank_server.groups import Groups
from rank_server.host_heap import give_back_free_pages
from rank_server.kv_pool import KvPool
from rank_server.link_timing import time_all_gather
from rank_server.models.decoder import SplitGroups
from rank_server.models.table import build_model, load_weights, resident_weights, up_projections
from rank_server.place import Place
from rank_server.pool_store import memory_to_share
from rank_server.recorded import RecordedPasses, few_decodes
from rank_server.runs import Report, run
from rank_server.sequences import PlanRefused, SequenceTable
from rank_server.step_batch import build, commit, hold, keep_history, no_history, take_in

if TYPE_CHECKING:
    from rank_server.models.table import Model, Weights


class Executor:
    """Model, pool, groups and requests of one rank.

    `backends` maps the names of collective backends to implementations; `progress` is called whenever a long command has
    got further; `device` is the one this rank insists on, `auto` = any that the configuration names; `workspace_bytes` bounds
    what one gather of cached context brings.
    """

    def __init__(
        self,
        model_files: ModelFiles,
        backends: Mapping[str, Callable[[], Backend]],
        progress: Callable[[], None],
        ranks_on_host: int = 1,
        device: str = "auto",
        *,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        self._files = model_files
        self._groups = Groups(backends)
        self._progress = progress
        self._ranks_on_host = ranks_on_host
        self._device = device
        self._workspace_bytes = workspace_bytes
        self._place: Place | None = None
        self._pool_is_shared = False
        self._weights: Weights | None = None
        self._bytes_per_block = 0
        self._pool: KvPool | None = None
        self._model: Model | None = None
        self._ways: Ways | None = None
        self._recorded: RecordedPasses | None = None
        self._sequences = SequenceTable()
        self.shared_memory: SharedPool | None = None
        """Where the pool lies, if other processes of this host may read it there."""
        self._run_to_end = 0
        self.load_fraction = 0.0
        """How much of its weights the rank has in memory, 0 … 1; may be read from any thread."""

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

    def configure(
        self,
        config: common_pb2.ClusterConfig,
        rank: int,
        pool_is_settled: bool = False,
        *,
        first_rank: int = 0,
        pool_is_shared: bool = False,
    ) -> rank_pb2.Configured:
        """Loads the rank's slice of the weights and says how large a pool it can hold.

        pool_is_settled: the other ranks of this host have their pools, so what memory is left is for this one alone.
        first_rank: global rank that the configuration's grid counts from. pool_is_shared: the pool is to lie where other
        processes of this host can read it, if there is such a place.
        """
        if self._place is not None:
            raise ConfigRefused("the rank is configured already")
        if self._device not in ("auto", config.device):
            raise ConfigRefused(f"rank {rank} computes on {self._device}, the cluster on {config.device}")
        place = Place.of(config, rank, self._files.shape, first_rank)
        self._groups.choose(config.collectives, place)
        with room_on(place.device, "the weights"):
            loaded = load_weights(self._files, place.grid.tp, place.tp_index, place.dtype, self._loaded, place.device)
            self._weights = resident_weights(self._files.shape, loaded, place.grid.pcp)
        give_back_free_pages()
        self._bytes_per_block = self._files.shape.kv_bytes_per_token(config.tp, config.kv_cache_dtype) * config.block_size
        blocks = self._room(config, place.device, 1 if pool_is_settled else self._ranks_on_host)
        self._place = place
        self._pool_is_shared = pool_is_shared and place.device.type == "cpu"
        return rank_pb2.Configured(
            config=place.taken_over(config, self._weights.dtype, self._files.hash, config.collectives),
            max_kv_blocks=blocks,
            kv_bytes_per_block=self._bytes_per_block,
            weight_bytes=self._weights.nbytes,
        )

    def allocate_pool(self, num_blocks: int) -> rank_pb2.PoolAllocated:
        """Creates the pool; all ranks of a set get the same number of blocks.

        `PoolRefused` when a block is not the size that the number of blocks was planned with, and when memory has become
        scarce since then.
        """
        shape, place = self._files.shape, self.place
        if self._pool is not None:
            raise PlanRefused("the KV pool is allocated already")
        spec = shape.kv_spec(place.grid.tp)
        shared = memory_to_share(num_blocks * self._bytes_per_block) if self._pool_is_shared else None
        with room_on(place.device, f"a KV pool of {num_blocks * self._bytes_per_block} bytes"):
            size, memory = place.layout.block_size, None if shared is None else torch.from_numpy(shared.data)
            pool = KvPool.of(spec, shape.num_layers, num_blocks, size, place.kv_dtype, place.device, memory)
        if pool.bytes_per_block != self._bytes_per_block:
            raise PoolRefused(f"a KV block takes {pool.bytes_per_block} bytes, {self._bytes_per_block} were planned")
        self._pool = pool
        self.shared_memory = shared
        gathered = shape.num_heads // place.grid.tp * place.grid.dcp_in_tp
        value_dim = spec.width if shape.mla is None else shape.mla.kv_lora_rank
        kernels_for(place.device).warm_up(place.kv_dtype, gathered // spec.heads, spec.width, value_dim)
        return rank_pb2.PoolAllocated(num_blocks=num_blocks, bytes=num_blocks * pool.bytes_per_block)

    def prepare_group(self, name: str, ranks: Sequence[int]) -> rank_pb2.GroupPrepared:
        """Bootstrap bytes for a group of which this rank is member 0."""
        return rank_pb2.GroupPrepared(bootstrap=self._groups.prepare(name, ranks))

    def open_group(self, name: str, ranks: Sequence[int], bootstrap: bytes, timeout_s: float) -> rank_pb2.GroupOpened:
        """Joins a group; waits for its members."""
        self._groups.join(name, ranks, self.place.rank, bootstrap, timeout_s)
        self._model = self._ways = None
        return rank_pb2.GroupOpened()

    def measure_group(self, name: str, payload_bytes: int, repeats: int, timeout_s: float) -> rank_pb2.GroupMeasured:
        """Times exchanges of an open group, together with its other members."""
        group = self._groups.named(name)
        group.set_timeout(timeout_s)
        seconds = time_all_gather(group, payload_bytes, repeats, self.place.device, self._progress)
        return rank_pb2.GroupMeasured(seconds=seconds)

    def reset(self) -> rank_pb2.ResetDone:
        """Forgets all requests and leaves all groups; weights and pool stay."""
        self._groups.forget()
        self._model = self._ways = self._recorded = None
        self._sequences.clear()
        return rank_pb2.ResetDone()

    def close_groups(self) -> None:
        """Leaves all groups without waiting for anybody; may be called from another thread to interrupt a collective."""
        self._groups.close()

    def step(self, plan: rank_pb2.StepPlan, meanwhile: Callable[[], None] = lambda: None) -> rank_pb2.StepResult:
        """One forward pass; meanwhile: is called when it begins, if the plan has rows. Collectives fail after the plan's
        timeout; a failure leaves the rank to be reset."""
        place, pool = self.place, self.pool
        check_way(plan, place.grid)
        self._groups.set_timeout(plan.timeout_ms / 1000)
        calls_before, seconds_before = self._groups.exchanged
        keep = partial(keep_history, vocab_size=self._files.shape.vocab_size, device=place.device)
        history_of = keep if self._samples else no_history
        take_in(plan, self._sequences, place.layout, place.member, history_of)
        result = rank_pb2.StepResult()
        if plan.rows:
            result = self._forward(plan, pool, meanwhile)
            commit(plan, self._sequences)
        result.ticket = plan.ticket
        result.blocks_in_use = self._sequences.blocks_in_use
        calls, seconds = self._groups.exchanged
        result.collectives = calls - calls_before
        result.collective_us = round(1e6 * (seconds - seconds_before))
        return result

    def run(self, plan: rank_pb2.StepPlan, report: Report) -> rank_pb2.StepResult:
        """The plan's step and the run that it allows; see `rank_server.runs`."""
        group, device = self._groups.of("wide", self.place), self.place.device
        return run(plan, self.step, self._sequences, group, device, lambda: self._run_to_end >= plan.ticket, report)

    def end_run(self, ticket: int) -> None:
        """Runs up to this ticket end after the step that they are in; may be called from any thread."""
        self._run_to_end = max(self._run_to_end, ticket)

    @torch.inference_mode()
    def _forward(self, plan: rank_pb2.StepPlan, pool: KvPool, meanwhile: Callable[[], None]) -> rank_pb2.StepResult:
        place = self.place
        model, ways = self._assemble(pool)
        rows = hold(plan, self._sequences, place.layout, place.member)
        share, flow = ways.of(plan, rows, self._sequences)
        batch = build(plan, self._sequences, share, place.device)

        def attend(layer: int, q: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
            self._progress()
            return flow.attend(layer, q, *rows)

        split = plan.decode_mode == common_pb2.DECODE_MODE_SPLIT
        if self._recorded is not None and isinstance(flow, ReplicatedFlow) and few_decodes(share):
            hidden = self._recorded.forward(batch.token_ids, batch.positions, attend, flow.batch, split, meanwhile)
        else:
            meanwhile()
            hidden = model.forward(batch.token_ids, batch.positions, attend, split, None if split else batch.answered)
        samples = self._samples and not (split and place.pcp_index > 0)
        logits_of = partial(model.logits, split=split)
        return answer(batch, hidden, logits_of, self._files.shape.vocab_size, samples, self._progress)

    @property
    def _samples(self) -> bool:
        """Whether this rank draws for its replica."""
        return self.place.tp_index == 0

    def _assemble(self, pool: KvPool) -> "tuple[Model, Ways]":
        if self._model is None or self._ways is None:
            place, shape = self.place, self._files.shape
            group = partial(self._groups.of, place=place)
            split = SplitGroups(group("pcp"), group("wide")) if place.grid.pcp > 1 else None
            self._model = build_model(shape, self._require_weights(), group("tp"), split)
            self._recorded = RecordedPasses.of(self._model, self._progress)
            self._ways = Ways(place, pool, group, shape, up_projections(self._require_weights()), self._workspace_bytes)
        return self._model, self._ways

    def _room(self, config: common_pb2.ClusterConfig, device: torch.device, sharers: int) -> int:
        """Blocks the pool may have; a GPU is this rank's alone, the host's memory is shared."""
        if device.type == "cpu":
            return max_kv_blocks(config, self._bytes_per_block, available_bytes(), sharers)
        free = free_bytes(device)
        return max_kv_blocks(config, self._bytes_per_block, free, 1, int(free * POOL_SHARE))

    def _require_weights(self) -> "Weights":
        if self._weights is None:
            raise PlanRefused("the rank is not configured yet")
        return self._weights

    def _loaded(self, done: int, total: int) -> None:
        self.load_fraction = done / total
        self._progress()
