"""Continuous batching: which tokens of which requests the next step computes, and what a finished step means.

Pure policy of one scheduling set: no clock, no wire. Running and waiting requests together stay in order of arrival: seats
are given from the front of the queue, and a preempted request, always the youngest that runs, goes back to the front.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from coordinator.choice import Replicas
from coordinator.kv_blocks import KvBlocks, Placement
from coordinator.owners import Owners
from coordinator.plan import Admission, Row, ScheduledStep
from coordinator.pricing import Pricing
from coordinator.request import Event, Request, State
from coordinator.rows import admission_of, finish_reason, row_of
from coordinator.scheduler_types import Progress, QueueFull, SchedulerConfig, SchedulerStats, StepOrderError
from coordinator.score_room import MAX_SCORED_VALUES_IN_STEP, ScoreRoom
from cp_layout.capacity import fits_ever
from cp_layout.interleave import Layout

__all__ = ["Progress", "QueueFull", "Scheduler", "SchedulerConfig", "SchedulerStats", "StepOrderError"]

MAX_CACHED_TOKENS_IN_PLAN = 1 << 20
"""A plan that carries more cached token ids than this (3 MB) admits nobody else."""


class Scheduler:
    """Scheduler of one set. `schedule` and `commit` cost O(rows + new blocks), however many requests wait and however long the
    contexts are; an admission costs its prefix hit besides, and digests that its request came without.

    identity: digest of what makes cached KV comparable (`cp_layout.blocks.cache_identity`).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        layout: Layout,
        blocks_per_member: int,
        identity: bytes,
        replicas: Replicas = Replicas(),  # noqa: B008 - frozen
        pricing: Pricing | None = None,
    ) -> None:
        self._config = config
        self._layout = layout
        self._blocks_per_member = blocks_per_member
        self._kv = KvBlocks(layout, blocks_per_member, identity)
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._running: OrderedDict[int, Request] = OrderedDict()
        self._released: list[int] = []
        self._in_flight: ScheduledStep | None = None
        self._stuck_head: int | None = None
        self._stats = SchedulerStats()
        self._owners = Owners(replicas, pricing)

    @property
    def running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Free blocks of each member; evictable prefix blocks count as free."""
        return self._kv.free_blocks

    @property
    def table_blocks(self) -> tuple[int, ...]:
        """Per member, entries of the running requests' block tables: what ranks report as in use while a step is in flight."""
        return self._kv.table_blocks

    @property
    def stats(self) -> SchedulerStats:
        """A copy of the counters."""
        return replace(self._stats)

    def add(self, *requests: Request) -> None:
        """Queues all of them or, with an error, none. `QueueFull` when they don't fit in the queue, `ValueError` for one that
        could block it for ever (G1).
        """
        for request in requests:
            if request.handle in self._running or request.handle in self._waiting:
                raise ValueError(f"request {request.handle} is already scheduled")
            prompt, more = len(request.prompt), request.sampling.max_tokens
            if prompt < 1 or more < 1 or not fits_ever(self._layout, prompt + more - 1, self._blocks_per_member):
                raise ValueError(
                    f"request {request.handle}: {prompt} prompt tokens and max_tokens {more} can never run in "
                    f"{self._blocks_per_member} blocks per member"
                )
        if len(self._waiting) + len(requests) > self._config.max_waiting:
            raise QueueFull(len(self._waiting), len(requests), self._config.max_waiting)
        for request in requests:
            self._kv.open(request)
            self._waiting[request.handle] = request

    def abort(self, handle: int) -> None:
        """Ends a request in any state; nothing happens when it has already ended or is unknown.

        If the step in flight carries it, that step's commit reports the end (without a token); otherwise nothing more is
        reported about it.
        """
        self.finish(handle, "abort")

    def finish(self, handle: int, reason: str) -> None:
        """Like `abort`, with a reason of the caller's, e.g. "stop" when the text edge has found a stop string."""
        if (queued := self._waiting.pop(handle, None)) is not None:
            queued.end(Event.END, reason)
            self._kv.close(queued)
        elif (request := self._running.get(handle)) is not None:
            if self._in_flight is not None and any(row.handle == handle for row in self._in_flight.rows):
                request.end(Event.END_IN_FLIGHT, reason)
            else:
                self._leave(request, reason)

    def fail_all(self, error: str) -> list[int]:
        """A rank was lost: every request ends with this error, pools and prefix cache are empty, nothing is in flight.

        The ranks forget their state by other means, so nothing is left to release. Returns the handles that ended.
        """
        ended = [*self._running.values(), *self._waiting.values()]
        for request in ended:
            request.end(Event.END, "error", error)
        self._running.clear()
        self._waiting.clear()
        self._released.clear()
        self._in_flight = None
        self._stuck_head = None
        self._kv.clear()
        self._owners.clear()
        return [request.handle for request in ended]

    def schedule(self) -> ScheduledStep | None:
        """The next step, None when there is nothing to do. `StepOrderError` while the previous one is not committed.

        Every running request gets one token of the budget, the oldest first; prefills share what is left by age, then
        the queue. Blocks are secured by age too: the youngest running request gives way (E2), so the oldest one can always
        run, and a step in which somebody gave way admits nobody.
        """
        if self._in_flight is not None:
            raise StepOrderError("a step is already in flight")
        scores = ScoreRoom(MAX_SCORED_VALUES_IN_STEP)
        shares, budget = self._share_budget(scores)
        rows, preempted = self._running_rows(shares)
        admissions: list[Admission] = []
        if not preempted:
            self._admit_waiting(budget, scores, rows, admissions)
        if not rows and not self._released:
            return None
        choice, facts = self._owners.decide(rows, self._running)
        step = ScheduledStep(
            released=tuple(self._released),
            admitted=tuple(admissions),
            rows=tuple(rows),
            decode_mode=choice.decode_mode,
            gather=choice.gather,
            cost_version=choice.cost_version,
            facts=facts,
        )
        self._released.clear()
        self._in_flight = step
        return step

    def commit(
        self, step: ScheduledStep, sampled: Mapping[int, int], failed: Mapping[int, str] | None = None
    ) -> list[Progress]:
        """Takes over the results of the step in flight; sampled: token by handle, failed: error by handle of a lost row.

        `StepOrderError` for any other step (a late result), `ValueError`, and no change, when a row that samples has no
        result or a result has no row.
        """
        failed = failed or {}
        if step is not self._in_flight:
            raise StepOrderError("the step is not the one in flight")
        drawing = {row.handle for row in step.rows if row.sample}
        carried = {row.handle for row in step.rows}
        if not (sampled.keys() <= drawing <= sampled.keys() | failed.keys()) or not failed.keys() <= carried:
            raise ValueError(
                f"the step draws for {sorted(drawing)} of {sorted(carried)}, "
                f"tokens came for {sorted(sampled)}, errors for {sorted(failed)}"
            )
        self._in_flight = None
        progress = [self._commit_row(row, sampled.get(row.handle), failed.get(row.handle)) for row in step.rows]
        return [each for each in progress if each is not None]

    def _share_budget(self, scores: ScoreRoom) -> tuple[dict[int, int], int]:
        """Tokens of the next step by running request, and the rest of the budget: none when scores cut a chunk short."""
        shares: dict[int, int] = {}
        budget = self._config.max_num_batched_tokens
        for handle in self._running:
            if budget == 0:
                break
            shares[handle] = 1
            budget -= 1
        for handle in shares:
            request = self._running[handle]
            wanted = min(request.num_known - request.num_computed, 1 + budget)
            shares[handle] = scores.take(request, wanted)
            budget = budget + 1 - wanted if shares[handle] == wanted else 0
        return shares, budget

    def _running_rows(self, shares: Mapping[int, int]) -> tuple[list[Row], bool]:
        """Rows of the running requests, and whether one had to give way.

        Victims are younger than the request that asks, so they have no row yet.
        """
        rows: list[Row] = []
        preempted = False
        for handle, count in shares.items():
            request = self._running.get(handle)
            if request is None:
                break
            missing = self._kv.missing(request, request.num_computed + count)
            while request.state is State.RUNNING and not self._kv.has_room(missing):
                self._preempt(next(reversed(self._running.values())))
                preempted = True
            if request.state is not State.RUNNING:
                break
            self._kv.grow(request, missing)
            rows.append(row_of(request, count, self._kv.tail(request, missing)))
        return rows, preempted

    def _admit_waiting(self, budget: int, scores: ScoreRoom, rows: list[Row], admissions: list[Admission]) -> None:
        """Gives seats to the front of the queue, as long as seats, budget and blocks for all known tokens are there.

        Blocks are handed out chunk by chunk, but a request gets in only if it fits as a whole; otherwise prefills would push
        one another out. Budget is left only when every row so far reaches the end of its request's known tokens, so no
        free block is meant for anybody else. A completion whose leader computes their prompt lets nobody pass: the leader is
        older, so it has all the budget but for its last chunk.
        """
        history = 0
        while self._waiting and budget > 0 and len(self._running) < self._config.max_num_seqs:
            handle, request = next(iter(self._waiting.items()))
            if handle == self._stuck_head or request.follows or history > MAX_CACHED_TOKENS_IN_PLAN:
                return
            placement = self._kv.place(request)
            if not self._kv.has_room(placement.free_needed):
                self._stuck_head = handle
                return
            del self._waiting[handle]
            self._admit(request, placement)
            admissions.append(admission_of(request, placement))
            history += len(admissions[-1].cached_token_ids)
            wanted = min(request.num_known - request.num_computed, budget)
            count = scores.take(request, wanted)
            budget = budget - count if count == wanted else 0
            self._kv.grow(request, self._kv.missing(request, request.num_computed + count))
            rows.append(row_of(request, count, self._kv.tail(request, self._kv.table_lengths(request))))

    def _admit(self, request: Request, placement: Placement) -> None:
        request.apply(Event.ADMIT)
        request.shard_offset = placement.shard_offset
        request.num_computed = placement.num_cached_tokens
        self._owners.admit(request)
        self._kv.admit(request, placement)
        self._running[request.handle] = request
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached_tokens = placement.num_cached_tokens
            self._stats.queried_tokens += len(request.prompt)
            self._stats.hit_tokens += placement.num_cached_tokens

    def _commit_row(self, row: Row, token: int | None, error: str | None) -> Progress | None:
        request = self._running[row.handle]
        if error is not None:
            self._leave(request, "error", error)
            return Progress(row.handle, None, request.finish_reason, request.error)
        before = request.num_recomputed
        request.advance(row.start + len(row.token_ids))
        self._stats.recomputed_tokens += request.num_recomputed - before
        self._kv.register(request, self._owners.num_shared(request))
        if row.score_token_ids:
            request.num_scored = row.score_start + len(row.score_token_ids)
        if request.state is State.ENDING:
            self._leave(request, "abort")
            return Progress(row.handle, None, request.finish_reason)
        if token is None:
            return None
        request.output.append(token)
        reason = finish_reason(request, row.output_index, token)
        if reason is not None:
            self._leave(request, reason)
        return Progress(row.handle, token, reason)

    def _preempt(self, request: Request) -> None:
        request.apply(Event.PREEMPT)
        request.num_computed = 0
        request.num_preemptions += 1
        self._stats.preemptions += 1
        self._give_back(request)
        self._waiting[request.handle] = request
        self._waiting.move_to_end(request.handle, last=False)

    def _leave(self, request: Request, reason: str, error: str | None = None) -> None:
        request.end(Event.END, reason, error)
        self._give_back(request)
        self._kv.close(request)

    def _give_back(self, request: Request) -> None:
        """Takes seat and blocks away; the ranks hear of it with the next step. A queue that was stuck may move again."""
        del self._running[request.handle]
        self._owners.release(request)
        self._kv.release(request)
        self._released.append(request.handle)
        self._stuck_head = None
