"""The rows of one step while they are put together."""

from collections.abc import Mapping

from coordinator.kv_blocks import KvBlocks
from coordinator.plan import Admission, Row
from coordinator.request import Request, State
from coordinator.rows import admission_of, row_of
from coordinator.scheduler_types import SchedulerConfig, SchedulerStats
from coordinator.score_room import MAX_SCORED_VALUES_IN_STEP, ScoreRoom
from coordinator.seats import Seats

MAX_CACHED_TOKENS_IN_PLAN = 1 << 20
"""A plan that carries more cached token ids than this (3 MB) admits nobody else."""


class StepDraft:
    """`fill` gives seats, blocks and budget to requests, and leaves what came of it in `rows` and `admissions`."""

    def __init__(self, config: SchedulerConfig, kv: KvBlocks, seats: Seats, stats: SchedulerStats) -> None:
        self.rows: list[Row] = []
        self.admissions: list[Admission] = []
        self._config = config
        self._kv = kv
        self._seats = seats
        self._stats = stats
        self._scores = ScoreRoom(MAX_SCORED_VALUES_IN_STEP)
        self._budget = config.max_num_batched_tokens
        self._history = 0
        """Cached token ids that the plan carries."""

    def fill(self) -> None:
        """Running requests by age, then those whose KV has arrived, then the queue; a step in which somebody gave way admits
        nobody."""
        shares = self._share_budget()
        if not self._running_rows(shares):
            self._take_in_arrived()
            self._admit_waiting()

    def _share_budget(self) -> dict[int, int]:
        """Tokens of the next step by running request. Nothing is left of the budget when scores cut a chunk short."""
        shares: dict[int, int] = {}
        running = self._seats.running
        for handle in running:
            if self._budget == 0:
                break
            shares[handle] = 1
            self._budget -= 1
        for handle in shares:
            request = running[handle]
            wanted = min(request.num_known - request.num_computed, 1 + self._budget)
            shares[handle] = self._scores.take(request, wanted)
            self._budget = self._budget + 1 - wanted if shares[handle] == wanted else 0
        return shares

    def _running_rows(self, shares: Mapping[int, int]) -> bool:
        """Rows of the running requests; returns whether blocks were short.

        Victims are younger than the request that asks, so they have no row yet.
        """
        short = False
        for handle, count in shares.items():
            request = self._seats.running.get(handle)
            if request is None:
                break
            missing = self._kv.missing(request, request.num_computed + count)
            while request.state is State.RUNNING and not self._kv.has_room(missing):
                short = True
                victim = self._seats.victim(request)
                if victim is None:
                    return True  # all that is in the way is read by others: it has to wait for them
                self._seats.preempt(victim)
                self._stats.preemptions += 1
            if request.state is not State.RUNNING:
                break
            self._kv.grow(request, missing)
            self.rows.append(row_of(request, count, self._kv.tail(request, missing)))
        return short

    def _take_in_arrived(self) -> None:
        """Requests whose KV has come run, the longest there first; they have seat and blocks."""
        for request in list(self._seats.arrived.values()):
            if self._budget == 0 or self._history > MAX_CACHED_TOKENS_IN_PLAN:
                return
            self._seats.take_in(request)
            request.was_admitted = True
            self._first_row(request)

    def _admit_waiting(self) -> None:
        """Gives seats to the front of the queue, as long as seats, budget and blocks for all known tokens are there.

        Blocks are handed out chunk by chunk, but a request gets in only if it fits as a whole; otherwise prefills would push
        one another out. Budget is left only when every row so far reaches the end of its request's known tokens, so no
        free block is meant for anybody else. A completion whose leader computes their prompt lets nobody pass: the leader is
        older, so it has all the budget but for its last chunk.
        """
        seats = self._seats
        while seats.waiting and self._budget > 0 and seats.num_seated < self._config.max_num_seqs:
            handle, request = next(iter(seats.waiting.items()))
            if handle == seats.stuck or request.follows or self._history > MAX_CACHED_TOKENS_IN_PLAN:
                return
            placement = self._kv.place(request)
            if not self._kv.has_room(placement.free_needed):
                seats.stuck = handle
                return
            seats.admit(request, placement)
            if not request.was_admitted:
                request.was_admitted = True
                request.num_cached_tokens = placement.num_cached_tokens
                self._stats.queried_tokens += len(request.prompt)
                self._stats.hit_tokens += placement.num_cached_tokens
            self._first_row(request)

    def _first_row(self, request: Request) -> None:
        """Admission and row of a request that runs from now on."""
        self.admissions.append(admission_of(request))
        self._history += len(self.admissions[-1].cached_token_ids)
        wanted = min(request.num_known - request.num_computed, self._budget)
        count = self._scores.take(request, wanted)
        self._budget = self._budget - count if count == wanted else 0
        self._kv.grow(request, self._kv.missing(request, request.num_computed + count))
        self.rows.append(row_of(request, count, self._kv.tail(request, self._kv.table_lengths(request))))
