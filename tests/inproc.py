"""A whole cluster in one process: real scheduler, real plans, real executors; ranks are threads over `local` or `shm` groups.

What it leaves out is gRPC. Pools begin full of NaN. A block is filled with NaN again when its last holder gives it back, unless
the prefix cache names it, and in any case when it enters a table: a read of an uncommitted, freed or foreign slot shows in the
tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from coordinator.choice import Replicas, computable
from coordinator.plan import DecodeMode, Gather, Sampling, ScheduledStep
from coordinator.request import Request
from coordinator.scheduler import Progress, Scheduler, SchedulerConfig
from coordinator.wire_plan import to_step_plan
from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.reorg import WORKSPACE_BYTES
from cp_wire.pb import common_pb2, rank_pb2
from model_files import open_model
from rank_server.collectives.local import LocalBackend, LocalHub
from rank_server.collectives.shm import ShmBackend
from rank_server.executor import Executor
from rank_server.worker import Worker

STEP_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Shape:
    """A cluster to build; the fields are the flags of `kvloom up`."""

    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    interleave: int = 4
    block_size: int = 4
    blocks: int = 64
    max_num_seqs: int = 16
    budget: int = 64
    merge: str = "a2a"
    dtype: str = "float32"
    kv_dtype: str = "float32"
    ways: frozenset[DecodeMode] | None = None
    """What the scheduler may choose; None = all that ranks can do."""
    pcp_gather: Gather = Gather.NONE
    """What prefill rows have to gather; NONE = as the scheduler chooses."""
    always_owner: bool = False
    """Steps of a few decode rows are dealt out too."""
    workspace_bytes: int = WORKSPACE_BYTES
    pool_is_shared: bool = False
    """Pools lie where other processes of this host can read them."""
    collectives: str = "local"
    """Or shm."""

    def config(self) -> common_pb2.ClusterConfig:
        return common_pb2.ClusterConfig(
            tp=self.tp,
            pcp=self.pcp,
            dcp=self.dcp,
            dp=1,
            interleave=self.interleave,
            block_size=self.block_size,
            max_model_len=1 << 20,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            merge={"a2a": common_pb2.MERGE_A2A, "ag_rs": common_pb2.MERGE_AG_RS}[self.merge],
            dtype=self.dtype,
            kv_cache_dtype=self.kv_dtype,
            collectives=self.collectives,
            device="cpu",
            kv_cache_tokens_per_rank=self.blocks * self.block_size,
        )


@dataclass
class Generation:
    """What one request produced."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: dict[int, common_pb2.PositionLogprobs] = field(default_factory=dict)
    """By prompt position; each one is reported once."""


class InprocCluster:
    """Ranks, scheduler and a loop over both."""

    def __init__(self, model: Path, shape: Shape) -> None:
        self.shape = shape
        self.grid = Grid(tp=shape.tp, pcp=shape.pcp, dcp=shape.dcp)
        self.layout = Layout(num_shards=shape.dcp, interleave=shape.interleave, block_size=shape.block_size)
        files = open_model(model)
        hub = LocalHub()
        self.workers = [Worker() for _ in range(self.grid.world_size)]
        self.executors = [
            Executor(
                files,
                {"local": lambda: LocalBackend(hub), "shm": ShmBackend},
                worker.touch,
                workspace_bytes=shape.workspace_bytes,
            )
            for worker in self.workers
        ]
        for worker in self.workers:
            worker.start()
        self.steps: list[ScheduledStep] = []
        self.plans: list[rank_pb2.StepPlan] = []
        self.results: list[list[rank_pb2.StepResult]] = []
        self.generations: dict[int, Generation] = {}
        self._free = [set(range(shape.blocks)) for _ in range(shape.dcp)]
        self._sequence = 0
        self._ticket = 0
        self._handle = 0
        self._prefills: dict[int, int] = {}
        self._bring_up()
        latent = files.shape.mla is not None
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=shape.max_num_seqs, max_num_batched_tokens=shape.budget, max_waiting=1000),
            self.layout,
            shape.blocks,
            identity=b"inproc",
            replicas=Replicas(shape.pcp, shape.dcp, shape.ways or computable(latent), shape.pcp_gather, latent),
        )

    def close(self) -> None:
        for executor in self.executors:
            executor.close_groups()
        for worker in self.workers:
            assert worker.stop(STEP_DEADLINE_S)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int], samplings: Sequence[Sampling] | None = None
    ) -> list[Generation]:
        """All prompts at once; returns when every request has ended."""
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
        requests = []
        for i, prompt in enumerate(prompts):
            sampling = samplings[i] if samplings else Sampling(temperature=0.0, max_tokens=limits[i])
            requests.append(self.submit(prompt, sampling))
        return self.finish(requests)

    def submit(self, prompt: Sequence[int], sampling: Sampling, leader: Request | None = None) -> Request:
        self._handle += 1
        request = Request(
            handle=self._handle,
            request_id=f"request-{self._handle}",
            prompt=list(prompt),
            sampling=sampling,
            salt=b"",
            leader=leader,
        )
        self.scheduler.add(request)
        self.generations[request.handle] = Generation()
        return request

    def finish(self, requests: Sequence[Request]) -> list[Generation]:
        done = {request.handle: self.generations[request.handle] for request in requests}
        while any(generation.finish_reason is None for generation in done.values()):
            progress = self.step()
            assert progress is not None, "the scheduler has nothing to do but requests are left"
            for item in progress:
                if item.finished is not None:
                    assert self.generations[item.handle].finish_reason is None
                    self.generations[item.handle].finish_reason = item.finished
        while self.step() is not None:
            pass
        for request in requests:
            done[request.handle].num_cached_tokens = request.num_cached_tokens
            done[request.handle].num_preemptions = request.num_preemptions
        return list(done.values())

    def step(self) -> list[Progress] | None:
        """One schedule → ranks → commit; None when there is nothing to do."""
        step = self.scheduler.schedule()
        if step is None:
            return None
        self._fill_freed_blocks()  # of those who gave way
        self._fill_new_blocks(step)
        self._ticket += 1
        plan = to_step_plan(step, ticket=self._ticket, timeout_ms=30_000)
        if self.shape.always_owner and plan.rows:
            self._force_owner(plan)
        self.plans.append(plan)
        results = self.execute(plan)
        self.steps.append(step)
        self.results.append(results)
        drawn = [token for result in results for token in result.sampled]
        tokens = [token.handle for token in drawn if not token.error]
        assert len(set(tokens)) == len(tokens), "two ranks sampled for one row"
        failed = {token.handle: token.error for token in drawn if token.error}
        sampled = {token.handle: token.token_id for token in drawn if not token.error}
        self._keep_scores([scores for result in results for scores in result.scores])
        progress = self.scheduler.commit(step, sampled, failed)
        self._fill_freed_blocks()
        logprobs = {token.handle: token.logprobs.sampled for token in drawn if token.HasField("logprobs")}
        for item in progress:
            if item.new_token is not None:
                self.generations[item.handle].token_ids.append(item.new_token)
                self.generations[item.handle].logprobs += [logprobs[item.handle]] if item.handle in logprobs else []
        return progress

    def execute(self, plan: rank_pb2.StepPlan) -> list[rank_pb2.StepResult]:
        """Has every rank run the plan."""
        return self.everywhere(lambda executor: executor.step(plan))

    def _force_owner(self, plan: rank_pb2.StepPlan) -> None:
        """Has the step's rows dealt out, few as they may be."""
        self._prefills |= {admitted.handle: admitted.num_prefill_tokens for admitted in plan.admitted}
        plan.decode_mode = common_pb2.DECODE_MODE_OWNER
        if plan.gather == common_pb2.GATHER_NONE and any(row.start < self._prefills[row.handle] for row in plan.rows):
            plan.gather = common_pb2.GATHER_Q if self.shape.pcp_gather is Gather.Q else common_pb2.GATHER_KV

    def _keep_scores(self, scores: Sequence[rank_pb2.PromptScores]) -> None:
        for each in scores:
            for position, logprobs in enumerate(each.positions, start=each.start):
                assert position not in self.generations[each.handle].prompt_logprobs
                self.generations[each.handle].prompt_logprobs[position] = logprobs

    def everywhere(self, call) -> list:  # type: ignore[no-untyped-def]
        """Runs call(executor) on every rank's own thread, in rank order of the results."""
        self._sequence += 1
        futures = [
            worker.submit(self._sequence, lambda executor=executor: call(executor))
            for worker, executor in zip(self.workers, self.executors, strict=True)
        ]
        return [future.result(STEP_DEADLINE_S)[0] for future in futures]

    def _bring_up(self) -> None:
        config = self.shape.config()
        ranks = range(self.grid.world_size)
        futures = [
            self.workers[rank].submit(
                0,
                lambda rank=rank: self.executors[rank].configure(config, rank, pool_is_shared=self.shape.pool_is_shared),
            )
            for rank in ranks
        ]
        for future in futures:
            assert future.result(STEP_DEADLINE_S)[0].max_kv_blocks == self.shape.blocks
        self.everywhere(lambda executor: executor.allocate_pool(self.shape.blocks))
        self.everywhere(lambda executor: executor.pool.fill_nan(range(self.shape.blocks)))
        self.open_groups()

    def open_groups(self) -> None:
        """As every rank needs them after its pool is there, and after a reset."""
        for name, group in self.grid.named_groups().items():
            if len(group) == 1:
                continue
            first = self.workers[group[0]].submit(0, lambda n=name, g=group: self.executors[g[0]].prepare_group(n, g))
            bootstrap = first.result(STEP_DEADLINE_S)[0].bootstrap
            opened = [
                self.workers[rank].submit(
                    0, lambda r=rank, n=name, g=group, b=bootstrap: self.executors[r].open_group(n, g, b, 30.0)
                )
                for rank in group
            ]
            for future in opened:
                future.result(STEP_DEADLINE_S)

    def free_blocks(self, member: int) -> set[int]:
        """Blocks of a member that nobody holds and the prefix cache does not name."""
        return set(self.scheduler._kv._pools[member]._free)

    def _fill_freed_blocks(self) -> None:
        for member, before in enumerate(self._free):
            self._free[member] = self.free_blocks(member)
            self._fill(member, sorted(self._free[member] - before))

    def _fill_new_blocks(self, step: ScheduledStep) -> None:
        admitted = {admission.handle: admission for admission in step.admitted}
        for row in step.rows:
            for member, blocks in enumerate(row.new_blocks):
                cached = 0
                if row.handle in admitted:
                    shard = self.layout.shard_on(member, admitted[row.handle].shard_offset)
                    cached = self.layout.blocks_needed(shard, admitted[row.handle].num_cached_tokens)
                self._fill(member, blocks[cached:])

    def _fill(self, member: int, blocks: Sequence[int]) -> None:
        for rank, executor in enumerate(self.executors):
            if self.grid.dcp_member(rank) == member:
                executor.pool.fill_nan(blocks)


@contextmanager
def cluster(model: Path, shape: Shape) -> Iterator[InprocCluster]:
    torch.set_num_threads(1)
    running = InprocCluster(model, shape)
    try:
        yield running
    finally:
        running.close()
