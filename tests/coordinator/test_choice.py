"""Which way a step is computed, by its global numbers alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.choice import Choice, Prices, Replicas, choose, computable, facts_of, work_of
from coordinator.plan import DecodeMode, Gather, Row, Sampling
from coordinator.request import Request
from cp_layout.cost import COST_VERSION, CostModel, Rates, StepFacts
from cp_layout.grid import Grid
from cp_layout.model_shape import MlaShape, ModelShape

OWNER, SPLIT, REPLICATED = DecodeMode.OWNER, DecodeMode.SPLIT, DecodeMode.REPLICATED
EVERY_WAY = frozenset(DecodeMode)


LONG = StepFacts(prefill_rows=1, prefill_tokens=9, prefill_context=900, prefill_pairs=9 * 905)
SHAPE = ModelShape("llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, 1e-5, 1e5, True, "bfloat16")


def mode(facts: StepFacts, pcp: int, dcp: int, *, bound: bool = False) -> DecodeMode:
    return choose(facts, Replicas(pcp, dcp, EVERY_WAY), bound=bound).decode_mode


def prices(pcp: int, dcp: int, **rates: float) -> Prices:
    return Prices(CostModel.of(SHAPE, Grid(1, pcp, dcp), 106e6, "bfloat16", "bfloat16"), Rates(**rates))


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4))
def test_one_replica_has_no_choice(decode: int, prefill: int, dcp: int) -> None:
    assert choose(StepFacts(decode, 0, prefill, prefill), Replicas(1, dcp, EVERY_WAY, Gather.Q)) == Choice()


@pytest.mark.parametrize("dcp", (1, 3, 6))
@pytest.mark.parametrize("decode", range(7))
def test_d3_decode_rows_are_dealt_out_from_one_per_replica_on(dcp: int, decode: int) -> None:
    wanted = REPLICATED if decode == 0 else SPLIT if decode < 3 else OWNER
    choice = choose(StepFacts(decode_rows=decode), Replicas(3, dcp, EVERY_WAY))
    assert choice == Choice(wanted, Gather.NONE)


@pytest.mark.parametrize("decode", (0, 1, 5))
def test_a_step_with_a_prefill_row_is_dealt_out(decode: int) -> None:
    facts = StepFacts(decode_rows=decode, prefill_rows=1, prefill_tokens=1)
    assert mode(facts, pcp=2, dcp=2) is OWNER
    assert mode(facts, pcp=4, dcp=1) is OWNER


def test_a_prefill_row_gathers_kv_where_every_replica_has_all_of_it() -> None:
    facts = LONG
    for forced in Gather:
        assert choose(facts, Replicas(2, 1, EVERY_WAY, forced)).gather is Gather.KV


@pytest.mark.parametrize("forced", (Gather.Q, Gather.KV))
def test_a_forced_gather_is_obeyed_by_prefill_rows_and_means_nothing_without(forced: Gather) -> None:
    replicas = Replicas(2, 2, EVERY_WAY, forced)
    assert choose(replace(LONG, decode_rows=3), replicas).gather is forced
    assert choose(StepFacts(3), replicas) == Choice(OWNER, Gather.NONE)


def test_a_row_that_only_its_owner_can_compute_is_computed_by_it() -> None:
    assert mode(StepFacts(decode_rows=1), pcp=2, dcp=1, bound=True) is OWNER
    assert mode(StepFacts(decode_rows=1), pcp=2, dcp=1) is SPLIT


@given(st.integers(0, 5), st.integers(0, 5), st.sets(st.sampled_from(DecodeMode)))
def test_nothing_is_chosen_that_is_not_allowed(decode: int, prefill: int, ways: set[DecodeMode]) -> None:
    replicas = Replicas(2, 2, frozenset({REPLICATED, *ways}))
    choice = choose(StepFacts(decode, 0, prefill, prefill), replicas)
    assert choice.decode_mode in replicas.ways
    assert (choice.gather is Gather.NONE) == (choice.decode_mode is not OWNER or not prefill)
    assert not (choice.decode_mode is SPLIT and prefill)


def test_latent_rows_are_not_split() -> None:
    assert computable(latent=False) == EVERY_WAY
    assert computable(latent=True) == {REPLICATED, OWNER}


def chunk(new: int, context: int) -> StepFacts:
    return StepFacts(prefill_rows=1, prefill_tokens=new, prefill_context=context, prefill_pairs=new * (context + new // 2))


def test_e5_the_gather_follows_what_global_numbers_cost() -> None:
    replicas, known = Replicas(2, 2, EVERY_WAY), prices(2, 2)
    first, deep = (choose(facts, replicas, known) for facts in (chunk(512, 0), chunk(16, 8000)))
    assert first == Choice(OWNER, Gather.KV, COST_VERSION)
    assert deep == Choice(OWNER, Gather.Q, COST_VERSION)
    forced = replace(replicas, gather=Gather.KV)
    assert choose(chunk(16, 8000), forced, known) == Choice(OWNER, Gather.KV), "nothing was chosen"


@given(st.integers(1, 2000), st.integers(0, 60_000), st.sampled_from([(2, 2), (3, 3), (4, 4)]))
def test_the_gather_is_the_cheaper_one(new: int, context: int, shape: tuple[int, int]) -> None:
    known = prices(*shape)
    facts = chunk(new, context)
    cost = {gather: known.seconds(work_of(Choice(OWNER, gather), facts, known.model)) for gather in (Gather.Q, Gather.KV)}
    assert cost[choose(facts, Replicas(*shape, EVERY_WAY), known).gather] == min(cost.values())


def test_a_lone_request_is_split_where_weights_weigh_more_than_rounds() -> None:
    replicas, lone = Replicas(2, 2, EVERY_WAY), StepFacts(decode_rows=1, decode_context=512)
    assert choose(lone, replicas, prices(2, 2, round=2e-5)) == Choice(SPLIT, Gather.NONE, COST_VERSION)
    assert choose(lone, replicas, prices(2, 2, round=2e-3)) == Choice(REPLICATED, Gather.NONE, COST_VERSION)


def test_work_is_counted_for_every_way() -> None:
    model = prices(2, 2).model
    decode = StepFacts(decode_rows=4, decode_context=400)
    assert work_of(Choice(REPLICATED), decode, model) == model.replicated(decode)
    assert work_of(Choice(SPLIT), decode, model) == model.split(decode)
    assert work_of(Choice(OWNER), decode, model) == model.owner_kv(decode) == model.owner_q(decode)
    assert work_of(Choice(OWNER, Gather.Q), LONG, model) == model.owner_q(LONG)
    assert work_of(Choice(OWNER, Gather.KV), LONG, model) == model.owner_kv(LONG) == model.owner_kv_all(LONG)
    assert work_of(Choice(OWNER, Gather.KV_ALL), decode, model) == model.owner_kv_all(decode) != model.owner_kv(decode)


def test_facts_count_rows_by_kind_and_prefill_tokens_with_their_context() -> None:
    requests = {}
    for handle, prefill in ((1, 5), (2, 9), (3, 2), (4, 1)):
        requests[handle] = Request(handle, "r", [0], Sampling(), num_prefill_tokens=prefill)

    def row(handle: int, start: int, count: int) -> Row:
        return Row(handle, start, (0,) * count, (), False, 0, False)

    rows = [row(1, 0, 4), row(2, 8, 1), row(3, 2, 1), row(4, 7, 1)]
    assert facts_of(rows, requests) == StepFacts(
        decode_rows=2,
        decode_context=9,
        prefill_rows=2,
        prefill_tokens=5,
        prefill_context=8,
        prefill_pairs=1 + 2 + 3 + 4 + 9,
    )


def test_latents_of_one_replica_may_come_to_its_prefill_rows() -> None:
    """Cut over TP members; decode rows always go to the latents."""
    latent = {"pcp": 1, "dcp": 2, "ways": computable(latent=True), "latent": True}
    facts = chunk(512, 100)
    assert choose(facts, Replicas(**latent, gather=Gather.KV)) == Choice(OWNER, Gather.KV)
    assert choose(facts, Replicas(**latent, gather=Gather.Q)) == Choice()
    assert choose(facts, Replicas(**latent)) == Choice()
    assert choose(StepFacts(decode_rows=3), Replicas(**latent, gather=Gather.KV)) == Choice()
    assert choose(facts, Replicas(**latent | {"dcp": 1}, gather=Gather.KV)) == Choice()
    assert choose(facts, Replicas(**latent | {"latent": False}, gather=Gather.KV)) == Choice()


@pytest.mark.parametrize("facts", [StepFacts(1, 900), StepFacts(5, 10), chunk(9, 9), replace(chunk(4, 0), decode_rows=2)])
@pytest.mark.parametrize(("pcp", "dcp"), [(1, 2), (2, 2), (2, 4)])
def test_a_gather_forced_for_latents_binds_all_rows(pcp: int, dcp: int, facts: StepFacts) -> None:
    latent = Replicas(pcp, dcp, computable(latent=True), Gather.KV_ALL, latent=True)
    assert choose(facts, latent, latent_prices(1 if pcp == dcp else 2, pcp, dcp)) == Choice(OWNER, Gather.KV_ALL)
    assert choose(StepFacts(), latent) == Choice(), "a step without rows"


@pytest.mark.parametrize("forced", [Gather.Q, Gather.KV])
def test_a_gather_forced_for_prefill_rows_leaves_decode_rows_their_queries(forced: Gather) -> None:
    latent = Replicas(2, 2, computable(latent=True), forced, latent=True)
    assert choose(StepFacts(3, 3), latent, latent_prices(1, 2, 2)) == Choice(OWNER)


@given(st.integers(1, 40), st.integers(0, 20_000), st.booleans(), st.sampled_from([(2, 1, 2), (1, 2, 2), (2, 2, 4)]))
def test_latents_come_to_decode_rows_where_that_is_cheaper(
    rows: int, context: int, beside: bool, grid: tuple[int, int, int]
) -> None:
    prices, replicas = latent_prices(*grid), Replicas(*grid[1:], computable(latent=True), latent=True)
    facts = replace(chunk(64, 100) if beside else StepFacts(), decode_rows=rows, decode_context=rows * context)
    choice = choose(facts, replicas, prices)
    queries = choose(facts, replace(replicas, latent=False), prices) if grid[1] > 1 else Choice()
    assert choice.cost_version == COST_VERSION
    cost, others = (prices.seconds(work_of(each, facts, prices.model)) for each in (choice, Choice(OWNER, Gather.KV_ALL)))
    assert cost <= min(others, prices.seconds(work_of(queries, facts, prices.model)))


@pytest.mark.parametrize("grid", [(2, 1, 2), (2, 2, 4)], ids=str)
def test_latents_come_to_decode_rows_of_short_contexts_alone(grid: tuple[int, int, int]) -> None:
    prices, replicas = latent_prices(*grid), Replicas(*grid[1:], computable(latent=True), latent=True)
    short, long = (choose(StepFacts(4, 4 * context), replicas, prices).gather for context in (16, 1000))
    assert (short, long) == (Gather.KV_ALL, Gather.NONE)


def latent_prices(tp: int, pcp: int, dcp: int) -> Prices:
    shape = ModelShape(
        "deepseek", 4, 1024, 16, 1, 64, 1024, 8192, 1 << 20, 1e-6, 1e4, False, "bfloat16", mla=MlaShape(None, 512, 128, 64, 128)
    )
    return Prices(CostModel.of(shape, Grid(tp, pcp, dcp), 1e7, "bfloat16", "bfloat16"), Rates())


def test_latents_come_to_long_chunks_and_queries_go_to_long_contexts() -> None:
    for tp, pcp, dcp in ((1, 2, 2), (2, 1, 2), (2, 2, 4)):
        replicas = Replicas(pcp, dcp, computable(latent=True), latent=True)
        prices = latent_prices(tp, pcp, dcp)
        long_chunk, long_context = (choose(facts, replicas, prices) for facts in (chunk(2048, 512), chunk(4, 1 << 17)))
        assert (long_chunk.gather, long_chunk.decode_mode) == (Gather.KV, OWNER)
        assert long_context.gather in (Gather.Q, Gather.NONE)
        assert long_context.decode_mode is (REPLICATED if pcp == 1 else OWNER)
        assert long_chunk.cost_version == long_context.cost_version == COST_VERSION


def test_replicas_do_not_split_passes_of_a_model_with_latents() -> None:
    assert SPLIT not in computable(latent=True)
    assert SPLIT in computable(latent=False)
    assert choose(StepFacts(decode_rows=1), Replicas(2, 2, computable(latent=True), latent=True)) == Choice()


@given(
    st.builds(StepFacts, st.integers(0, 9), st.integers(0, 90_000)),
    st.sampled_from([(1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2), (2, 2, 4), (1, 4, 4)]),
    st.sampled_from([Gather.NONE, Gather.Q, Gather.KV, Gather.KV_ALL]),
    st.booleans(),
    st.booleans(),
)
def test_whatever_it_costs_latents_are_never_split(
    decode: StepFacts, grid: tuple[int, int, int], gather: Gather, beside: bool, bound: bool
) -> None:
    replicas = Replicas(*grid[1:], computable(latent=True), gather, latent=True)
    facts = replace(decode, prefill_rows=1, prefill_tokens=9, prefill_pairs=45) if beside else decode
    for prices in (None, latent_prices(*grid)):
        assert choose(facts, replicas, prices, bound).decode_mode is not SPLIT
