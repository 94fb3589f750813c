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
from coordinator.plan import Gather, Sampling, ScheduledStep
from coordinator.request import Request
from coordinator.scheduler import Progress, Scheduler, SchedulerConfig
from coordinator.wire_plan import to_step_plan
from cp_wire.pb import common_pb2, rank_pb2
from tests.inproc_ranks import InprocRanks, Shape

__all__ = ["Generation", "InprocCluster", "Shape", "cluster"]


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


class InprocCluster(InprocRanks):
    """Ranks, scheduler and a loop over both."""

    def __init__(self, model: Path, shape: Shape) -> None:
        super().__init__(model, shape)
        self.steps: list[ScheduledStep] = []
        self.plans: list[rank_pb2.StepPlan] = []
        self.results: list[list[rank_pb2.StepResult]] = []
        self.generations: dict[int, Generation] = {}
        self._free = [set(range(shape.blocks)) for _ in range(shape.dcp)]
        self._ticket = 0
        self._handle = 0
        self._prefills: dict[int, int] = {}
        latent = self.files.shape.mla is not None
        self.scheduler = Scheduler(
            SchedulerConfig(shape.max_num_seqs, shape.budget, max_waiting=1000, max_ahead=shape.ahead),
            self.layout,
            shape.blocks,
            identity=b"inproc",
            replicas=Replicas(shape.pcp, shape.dcp, shape.ways or computable(latent), shape.pcp_gather, latent),
        )

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
        """One schedule → ranks → commit, with all steps of its run; None when there is nothing to do."""
        step = self.scheduler.schedule()
        if step is None:
            return None
        self._fill_freed_blocks()  # of those who gave way
        self._fill_new_blocks(step)
        self._ticket += 1
        plan = to_step_plan(step, ticket=self._ticket, timeout_ms=30_000)
        if self.shape.always_owner and plan.rows:
            self._force_owner(plan)
        *told, last = self.execute(plan)
        progress = [each for results in told for each in self._take_over(plan, results, more=True)]
        return progress + self._take_over(plan, last, more=False)

    def _take_over(self, plan: rank_pb2.StepPlan, results: list[rank_pb2.StepResult], more: bool) -> list[Progress]:
        """Commits a step of a plan, after which its run goes on or not."""
        step = self.scheduler.in_flight
        self.steps.append(step)
        of_step = to_step_plan(step, plan.ticket, plan.timeout_ms)
        of_step.decode_mode, of_step.gather = plan.decode_mode, plan.gather
        self.plans.append(of_step)
        self.results.append(results)
        drawn = [token for result in results for token in result.sampled]
        tokens = [token.handle for token in drawn if not token.error]
        assert len(set(tokens)) == len(tokens), "two ranks sampled for one row"
        failed = {token.handle: token.error for token in drawn if token.error}
        sampled = {token.handle: token.token_id for token in drawn if not token.error}
        self._keep_scores([scores for result in results for scores in result.scores])
        progress = self.scheduler.commit(step, sampled, failed, more=more)
        self._fill_freed_blocks()
        logprobs = {token.handle: token.logprobs.sampled for token in drawn if token.HasField("logprobs")}
        for item in progress:
            if item.new_token is not None:
                self.generations[item.handle].token_ids.append(item.new_token)
                self.generations[item.handle].logprobs += [logprobs[item.handle]] if item.handle in logprobs else []
        return progress

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
