"""Random lives of random clusters: whatever happens, each request gets the tokens it would have had alone."""

from unittest import TestCase

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.choice import Replicas
from coordinator.plan import DecodeMode, ScheduledStep
from coordinator.request import State
from cp_layout.capacity import fits_ever
from cp_layout.interleave import Layout
from tests.coordinator.oracle import VOCAB, Cluster, run_alone


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, are aborted, stopped, failed and preempted at any moment, also while a step or a run is in flight."""

    cluster: Cluster
    in_flight: ScheduledStep | None = None

    def __init__(self) -> None:
        super().__init__()
        self.disturbed: set[int] = set()

    @initialize(
        shape=st.sampled_from([(n, i, b) for n in (1, 2, 3, 4) for b in (1, 2, 4) for i in sorted({1, min(2, b), b})]),
        blocks=st.integers(2, 12),
        seats=st.integers(1, 5),
        budget=st.one_of(st.integers(1, 4), st.integers(1, 40)),
        pcp=st.integers(1, 4),
        ways=st.sampled_from([{DecodeMode.OWNER}, {DecodeMode.OWNER, DecodeMode.SPLIT}, {DecodeMode.SPLIT}, set()]),
        ahead=st.sampled_from([0, 1, 3, 31]),
    )
    def start(
        self, shape: tuple[int, int, int], blocks: int, seats: int, budget: int, pcp: int, ways: set[DecodeMode], ahead: int
    ) -> None:
        shards = shape[0]
        replicas = Replicas(
            pcp=pcp if shards == 1 or shards % pcp == 0 else 1, dcp=shards, ways=frozenset({DecodeMode.REPLICATED, *ways})
        )
        self.cluster = Cluster(
            Layout(*shape), blocks, max_num_seqs=seats, max_num_batched_tokens=budget, replicas=replicas, max_ahead=ahead
        )

    @rule(
        length=st.integers(1, 40),
        variant=st.integers(0, 40),
        max_tokens=st.integers(1, 20),
        min_tokens=st.integers(0, 3),
        stops=st.sampled_from([(), (3, 7), tuple(range(0, VOCAB, 4))]),
        salt=st.sampled_from([b"", b"tenant"]),
        more=st.sampled_from([{}, {"prompt_logprobs": 0}, {"presence_penalty": 1.0}]),
        completions=st.integers(1, 3),
    )
    def add(
        self, length: int, variant: int, max_tokens: int, min_tokens: int, stops: tuple[int, ...], salt: bytes,
        more: dict[str, float], completions: int,
    ) -> None:  # fmt: skip
        """Prompts share a prefix up to `variant`."""
        assume(fits_ever(self.cluster.layout, length + max_tokens - 1, self.cluster.blocks_per_member))
        prompt = [p % 11 if p < variant else (p + variant) % 13 + 11 for p in range(length)]
        sampling = {"min_tokens": min(min_tokens, max_tokens), "stop_token_ids": stops}
        leader = self.cluster.add(prompt, max_tokens, salt=salt, **sampling, **more)
        for _ in range(1, completions):
            self.cluster.add(prompt, max_tokens, salt=salt, leader=leader, **sampling)

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def dispatch(self) -> None:
        self.in_flight = self.cluster.dispatch()

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def commit(self) -> None:
        self.cluster.commit(self.in_flight)
        self.in_flight = None

    @precondition(lambda self: self.in_flight is not None and self.cluster.can_go_on(self.in_flight))
    @rule()
    def go_on(self) -> None:
        self.in_flight = self.cluster.go_on(self.in_flight)

    @precondition(lambda self: self.in_flight is not None and self.in_flight.rows)
    @rule(index=st.integers(0, 4))
    def commit_with_a_failed_row(self, index: int) -> None:
        handle = self.in_flight.rows[index % len(self.in_flight.rows)].handle
        self.disturbed.add(handle)
        self.cluster.commit(self.in_flight, {handle: "logits are not finite"})
        self.in_flight = None

    @precondition(lambda self: self.cluster.requests)
    @rule(index=st.integers(0, 50), reason=st.sampled_from(["abort", "stop"]))
    def end_early(self, index: int, reason: str) -> None:
        handles = list(self.cluster.requests)
        handle = handles[index % len(handles)]
        if self.cluster.requests[handle].state is not State.FINISHED:
            self.disturbed.add(handle)
        if reason == "abort":
            self.cluster.scheduler.abort(handle)
        else:
            self.cluster.scheduler.finish(handle, reason)

    @rule(unlucky=st.integers(0, 9))
    def lose_a_rank(self, unlucky: int) -> None:
        if unlucky == 0:
            self.disturbed.update(self.cluster.scheduler.fail_all("rank 1 was lost"))
            self.cluster.ranks.reset()
            self.in_flight = None
            self.cluster.check_idle()

    @invariant()
    def order_of_arrival(self) -> None:
        """Running before waiting, both by age, and a seat for nobody who has ended."""
        if hasattr(self, "cluster"):
            active = [r for r in self.cluster.requests.values() if r.state is not State.FINISHED]
            assert len(active) == self.cluster.scheduler.running + self.cluster.scheduler.waiting
            waits = [r.state is State.WAITING for r in active]
            assert waits == sorted(waits)

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        if self.in_flight is not None:
            self.cluster.commit(self.in_flight)
        self.cluster.drain()
        for handle, request in self.cluster.requests.items():
            if handle in self.disturbed:
                alone = run_alone(request.prompt, request.sampling)[0]
                assert self.cluster.tokens[handle] == request.output == alone[: len(request.output)]
            else:
                self.cluster.check_output(request)
        totals = self.cluster.scheduler.stats
        assert totals.recomputed_tokens == sum(r.num_recomputed for r in self.cluster.requests.values())
        assert totals.preemptions == sum(r.num_preemptions for r in self.cluster.requests.values())
        assert totals.hit_tokens == sum(r.num_cached_tokens for r in self.cluster.requests.values())


def _test_case(examples: int) -> type[TestCase]:
    class Machine(SchedulerMachine):
        pass

    Machine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    return Machine.TestCase


TestScheduler = _test_case(100)
TestSchedulerLong = pytest.mark.sweep(_test_case(3000))
