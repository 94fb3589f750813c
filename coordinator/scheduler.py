"""Continuous batching: which tokens of which requests the next step computes, and what a finished step means.

Pure policy of one scheduling set: no clock, no wire. Running and waiting requests together stay in order of arrival: seats
are given from the front of the queue, and a preempted request, always the youngest that runs, goes back to the front.
"""

from collections.abc import Mapping
from dataclasses import replace

from coordinator.choice import Replicas
from coordinator.kv_blocks import KvBlocks
from coordinator.owners import Owners
from coordinator.plan import Row, ScheduledStep
from coordinator.pricing import Pricing
from coordinator.request import Event, Request, State
from coordinator.rows import finish_reason
from coordinator.runs import lead, moved_on
from coordinator.scheduler_types import Progress, QueueFull, SchedulerConfig, SchedulerStats, StepOrderError
from coordinator.seats import Seats
from coordinator.step_draft import StepDraft
from cp_layout.capacity import fits_ever
from cp_layout.interleave import Layout

__all__ = ["Progress", "QueueFull", "Scheduler", "SchedulerConfig", "SchedulerStats", "StepOrderError"]


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
        self._owners = Owners(replicas, pricing)
        self._seats = Seats(self._kv, self._owners)
        self._in_flight: ScheduledStep | None = None
        self._stats = SchedulerStats()

    @property
    def running(self) -> int:
        """Requests that the ranks compute."""
        return len(self._seats.running)

    @property
    def seated(self) -> int:
        """Requests that hold blocks to be computed in, or to move KV to."""
        return self._seats.num_seated

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._seats.waiting)

    @property
    def may_grow(self) -> bool:
        """See `Seats.may_grow`. Otherwise the steps that are allowed already hold up nobody who waits."""
        return self._seats.may_grow(self._config.max_num_seqs)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Free blocks of each member; evictable prefix blocks count as free."""
        return self._kv.free_blocks

    @property
    def in_flight(self) -> ScheduledStep | None:
        """The step that the ranks compute."""
        return self._in_flight

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
            self._check(request)
        if self.waiting + len(requests) > self._config.max_waiting:
            raise QueueFull(self.waiting, len(requests), self._config.max_waiting)
        for request in requests:
            self._seats.queue(request)

    def reserve(self, request: Request) -> int | None:
        """Gives a request whose KV will come from another set a seat, and blocks for its prompt and the first token after it.

        Returns how many of its tokens the prefix cache has already; None, and no change, when there is no room now, when
        preempted requests wait, or when its leader's prompt is not there yet. `ValueError` as for `add`.
        """
        self._check(request)
        seats = self._seats
        if request.follows or seats.stuck == request.handle or seats.waiting or seats.num_seated >= self._config.max_num_seqs:
            return None
        more = min(1, request.sampling.max_tokens - 1)
        self._kv.open(request)
        placement = self._kv.place(request, more)
        if not self._kv.has_room(placement.free_needed):
            self._kv.close(request)
            seats.stuck = request.handle
            return None
        seats.reserve(request, placement, request.num_known + more)
        return placement.num_cached_tokens

    def arrive(self, handle: int, num_computed: int) -> None:
        """The first `num_computed` tokens of a reserved request are in its blocks: the next steps go on from there.

        At least one known token must be left to compute. Nothing happens for an unknown handle.
        """
        self._seats.arrive(handle, num_computed)

    def cancel(self, handle: int) -> None:
        """Gives up a reservation that nobody writes to any more; nothing for an unknown handle."""
        if handle in self._seats.reserved:
            self._seats.cancel(handle, "abort")

    def end_lease(self, handle: int) -> None:
        """Nobody reads a leased request's blocks any more; nothing happens for an unknown handle."""
        self._seats.end_lease(handle)

    def columns(self, request: Request, member: int, columns: range) -> tuple[int, ...]:
        """See `KvBlocks.columns`; of a request that holds blocks."""
        return self._kv.columns(request, member, columns)

    def abort(self, handle: int) -> None:
        """Ends a request in any state but reserved; nothing happens when it has already ended or is unknown.

        If the step in flight carries it, the commit that leaves none in flight reports the end (without a token); otherwise
        nothing more is reported about it.
        """
        self.finish(handle, "abort")

    def finish(self, handle: int, reason: str) -> None:
        """Like `abort`, with a reason of the caller's, e.g. "stop" when the text edge has found a stop string."""
        seats = self._seats
        if handle in seats.waiting:
            queued = seats.waiting.pop(handle)
            queued.end(Event.END, reason)
            self._kv.close(queued)
        elif handle in seats.arrived:
            seats.cancel(handle, reason)
        elif (request := seats.running.get(handle)) is not None:
            if self._in_flight is not None and any(row.handle == handle for row in self._in_flight.rows):
                request.end(Event.END_IN_FLIGHT, reason)
            else:
                seats.leave(request, reason)

    def fail_all(self, error: str) -> list[int]:
        """A rank was lost: every request ends with this error, pools and prefix cache are empty, nothing is in flight.

        The ranks forget their state by other means, so nothing is left to release. Returns the handles that ended.
        """
        ended = self._seats.clear()
        for request in ended:
            request.end(Event.END, "error", error)
        self._in_flight = None
        return [request.handle for request in ended]

    def schedule(self) -> ScheduledStep | None:
        """The next step, None when there is nothing to do. `StepOrderError` while the previous one is not committed.

        Every running request gets one token of the budget, the oldest first; prefills share what is left by age, then
        the queue. Blocks are secured by age too: the youngest running request gives way (E2), so the oldest one can always
        run, and a step in which somebody gave way admits nobody.
        """
        if self._in_flight is not None:
            raise StepOrderError("a step is already in flight")
        draft = StepDraft(self._config, self._kv, self._seats, self._stats)
        draft.fill()
        rows, admissions = tuple(draft.rows), draft.admissions
        if not rows and not self._seats.released:
            return None
        choice, facts = self._owners.decide(rows, self._seats.running)
        ahead = 0
        if rows and not self.may_grow:
            ahead, rows = lead(rows, self._seats.running, self._kv, self._config.max_ahead)
        step = ScheduledStep(
            released=tuple(self._seats.released),
            admitted=tuple(admissions),
            rows=rows,
            decode_mode=choice.decode_mode,
            gather=choice.gather,
            cost_version=choice.cost_version,
            facts=facts,
            ahead=ahead,
        )
        self._seats.released.clear()
        self._in_flight = step
        return step

    def commit(
        self, step: ScheduledStep, sampled: Mapping[int, int], failed: Mapping[int, str] | None = None, *, more: bool = False
    ) -> list[Progress]:
        """Takes over the results of the step in flight; sampled: token by handle, failed: error by handle of a lost row.

        more: the ranks go on with the run, whose next step is now `in_flight`. Requests that have ended meanwhile keep their
        blocks until the run is over. `StepOrderError` for any other step (a late result), `ValueError`, and no change, when a
        row that samples has no result, a result has no row, or the run can't go on.
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
        if more and (failed or not step.ahead):
            raise ValueError(f"{len(failed)} rows failed and {step.ahead} further steps are allowed, but the ranks go on")
        self._in_flight = moved_on(step, sampled) if more else None
        progress = [self._commit_row(row, sampled.get(row.handle), failed.get(row.handle)) for row in step.rows]
        return [each for each in progress if each is not None]

    def _commit_row(self, row: Row, token: int | None, error: str | None) -> Progress | None:
        request = self._seats.running[row.handle]
        if error is not None:
            self._seats.leave(request, "error", error)
            return Progress(row.handle, None, request.finish_reason, request.error)
        before = request.num_recomputed
        request.advance(row.start + len(row.token_ids))
        self._stats.recomputed_tokens += request.num_recomputed - before
        if request.num_computed <= request.num_known:
            self._kv.register(request, self._owners.num_shared(request))
            if row.start < request.num_prefill_tokens <= request.num_computed:
                self._seats.stuck = None  # who did not fit may share this prompt
        if row.score_token_ids:
            request.num_scored = row.score_start + len(row.score_token_ids)
        if request.state is State.ENDING:
            if self._in_flight is not None:
                return None
            self._seats.leave(request, "abort")
            return Progress(row.handle, None, request.finish_reason)
        if token is None:
            return None
        request.output.append(token)
        reason = finish_reason(request, row.output_index, token)
        if reason is not None:
            self._seats.leave(request, reason)
        return Progress(row.handle, token, reason)

    def _check(self, request: Request) -> None:
        if request.handle in self._seats:
            raise ValueError(f"request {request.handle} is already scheduled")
        prompt, more = len(request.prompt), request.sampling.max_tokens
        if prompt < 1 or more < 1 or not fits_ever(self._layout, prompt + more - 1, self._blocks_per_member):
            raise ValueError(
                f"request {request.handle}: {prompt} prompt tokens and max_tokens {more} can never run in "
                f"{self._blocks_per_member} blocks per member"
            )
