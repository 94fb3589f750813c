"""Which way a step is computed, by its global numbers alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.choice import COMPUTABLE, Choice, Replicas, StepFacts, choose, facts_of
from coordinator.plan import DecodeMode, Gather, Row, Sampling
from coordinator.request import Request

OWNER, SPLIT, REPLICATED = DecodeMode.OWNER, DecodeMode.SPLIT, DecodeMode.REPLICATED
EVERY_WAY = frozenset(DecodeMode)


def mode(facts: StepFacts, **replicas: object) -> DecodeMode:
    return choose(facts, Replicas(ways=EVERY_WAY, **replicas)).decode_mode  # type: ignore[arg-type]


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4))
def test_one_replica_has_no_choice(decode: int, prefill: int, dcp: int) -> None:
    assert choose(StepFacts(decode, prefill, prefill, 0), Replicas(1, dcp, EVERY_WAY, Gather.Q)) == Choice()


@pytest.mark.parametrize("dcp", (1, 3, 6))
@pytest.mark.parametrize("decode", range(7))
def test_d3_decode_rows_are_dealt_out_from_one_per_replica_on(dcp: int, decode: int) -> None:
    wanted = REPLICATED if decode == 0 else SPLIT if decode < 3 else OWNER
    choice = choose(StepFacts(decode_rows=decode), Replicas(3, dcp, EVERY_WAY))
    assert choice == Choice(wanted, Gather.NONE)


@pytest.mark.parametrize("decode", (0, 1, 5))
def test_a_step_with_a_prefill_row_is_dealt_out(decode: int) -> None:
    facts = StepFacts(decode, prefill_rows=1, prefill_tokens=1)
    assert mode(facts, pcp=2, dcp=2) is OWNER
    assert mode(facts, pcp=4, dcp=1) is OWNER


def test_a_prefill_row_gathers_kv_where_every_replica_has_all_of_it() -> None:
    facts = StepFacts(0, 1, 9, 900)
    for forced in Gather:
        assert choose(facts, Replicas(2, 1, EVERY_WAY, forced)).gather is Gather.KV


@pytest.mark.parametrize("forced", (Gather.Q, Gather.KV))
def test_a_forced_gather_is_obeyed_by_prefill_rows_and_means_nothing_without(forced: Gather) -> None:
    replicas = Replicas(2, 2, EVERY_WAY, forced)
    assert choose(StepFacts(3, 1, 9, 900), replicas).gather is forced
    assert choose(StepFacts(3), replicas) == Choice(OWNER, Gather.NONE)


def test_a_row_that_only_its_owner_can_compute_is_computed_by_it() -> None:
    assert mode(StepFacts(decode_rows=1, bound_rows=1), pcp=2, dcp=1) is OWNER
    assert mode(StepFacts(decode_rows=1), pcp=2, dcp=1) is SPLIT


@given(st.integers(0, 5), st.integers(0, 5), st.sets(st.sampled_from(DecodeMode)))
def test_nothing_is_chosen_that_is_not_allowed(decode: int, prefill: int, ways: set[DecodeMode]) -> None:
    replicas = Replicas(2, 2, frozenset({REPLICATED, *ways}))
    choice = choose(StepFacts(decode, prefill, prefill, 0), replicas)
    assert choice.decode_mode in replicas.ways
    assert (choice.gather is Gather.NONE) == (choice.decode_mode is not OWNER or not prefill)
    assert not (choice.decode_mode is SPLIT and prefill)


def test_every_set_can_run_replicated() -> None:
    assert REPLICATED in COMPUTABLE


def test_facts_count_rows_by_kind_and_prefill_tokens_with_their_context() -> None:
    requests = {}
    for handle, prefill, bound in ((1, 5, False), (2, 9, False), (3, 2, True), (4, 1, False)):
        requests[handle] = Request(handle, "r", [0], Sampling(), num_prefill_tokens=prefill, is_bound=bound)

    def row(handle: int, start: int, count: int) -> Row:
        return Row(handle, start, (0,) * count, (), False, 0, False)

    rows = [row(1, 0, 4), row(2, 8, 1), row(3, 2, 1), row(4, 7, 1)]
    assert facts_of(rows, requests) == StepFacts(2, 2, 5, 8, 1)
