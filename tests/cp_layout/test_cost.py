"""The cost model against the crossover by bytes, its own symmetries, and counting by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_layout.cost import CostModel, Rates, StepFacts, Work, seconds
from cp_layout.errors import LayoutError
from cp_layout.grid import Grid
from cp_layout.model_shape import MlaShape, ModelShape

GQA = ModelShape("llama", 2, 64, 8, 2, 16, 96, 100, 8192, 1e-5, 1e5, True, "bfloat16")
LATENT = replace(GQA, num_kv_heads=1, mla=MlaShape(None, 48, 16, 16, 16))
NO_LINK = Work(steps=1, linear_flops=1, weight_bytes=1, attention_flops=1, cache_bytes=1)


def model(shape: ModelShape = GQA, tp: int = 1, pcp: int = 2, dcp: int = 2, **dtypes: str) -> CostModel:
    names = {"dtype": "bfloat16", "kv_dtype": "bfloat16"} | dtypes
    return CostModel.of(shape, Grid(tp, pcp, dcp), 1000, **names)


def chunk(new: int, context: int, decode_rows: int = 0, decode_context: int = 0) -> StepFacts:
    return StepFacts(decode_rows, decode_context, 1, new, context, new * context + new * (new + 1) // 2)


def crossover(costs: CostModel, new: int) -> float:
    """S_ctx at which both gathers receive the same bytes: they are linear in it."""

    def difference(context: int) -> float:
        facts = chunk(new, context)
        return costs.owner_q(facts).wire_bytes - costs.owner_kv(facts).wire_bytes

    at_0, at_1000 = difference(0), difference(1000)
    return -at_0 / (at_1000 - at_0) * 1000


@pytest.mark.parametrize("pcp", (2, 3, 4))
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_crossover_by_bytes_of_grouped_queries(pcp: int, dtype: str, kv_dtype: str) -> None:
    size = {"bfloat16": 2, "float32": 4}
    e, e_kv, e_o, new = size[dtype], size[kv_dtype], 4, 320
    costs = model(pcp=pcp, dcp=pcp, dtype=dtype, kv_dtype=kv_dtype)
    by_bytes = 8 / 2 * (e + e_o) / (2 * e_kv) * new
    lse = 8 * 4 / (2 * 2 * 16 * e_kv) * new
    wider_new_kv = (e / e_kv - 1) * new
    assert crossover(costs, new) == pytest.approx(by_bytes + lse + wider_new_kv)
    if e == e_kv:
        assert crossover(costs, new) == pytest.approx(by_bytes, rel=0.05)


@pytest.mark.parametrize(("tp", "pcp", "dcp"), [(1, 2, 2), (2, 2, 2), (2, 3, 6), (4, 2, 8)])
def test_crossover_by_bytes_of_a_latent(tp: int, pcp: int, dcp: int) -> None:
    dc, dr, dv, e, e_o, e_kv, new = 48, 16, 16, 2, 4, 2, 320
    d = dcp // pcp
    returned = dc if d > 1 else dv
    by_bytes = 8 * d / tp * ((dc + dr) * e + returned * e_o + 4) / ((dc + dr) * e_kv) * new
    new_kv_to_the_other_tp_members = (dcp - pcp) / pcp * dcp / (dcp - 1) * new
    assert crossover(model(LATENT, tp, pcp, dcp), new) == pytest.approx(by_bytes + new_kv_to_the_other_tp_members)


def test_work_of_one_prefill_counted_by_hand() -> None:
    """Two layers, 8 Q heads and 2 KV heads of 16, bf16; 100 new tokens behind 1000 over two replicas."""
    costs, facts = model(), chunk(100, 1000)
    pairs = 100 * 1000 + 5050
    q = costs.owner_q(facts)
    assert q.rounds == 2 * 2
    assert q.wire_bytes == 2 * 50 * (8 * 16 * 2 + 2 * 2 * 16 * 2 + 8 * (16 + 1) * 4)
    partial = 8 * (16 + 1) * 4
    # Partials of 100 rows are written, and of 50 rows two are merged to one.
    assert q.cache_bytes == 2 * (500 * 2 * 2 * 16 * 2 + (100 + 2 * 50 + 50) * partial)
    kv = costs.owner_kv(facts)
    assert kv.rounds == 2 * (1 + 1)
    assert kv.wire_bytes == 2 * (50 * 64 * 2 + 500 * 64 * 2)
    # 500 keys are read to be sent, 1000 are attended; partials of new keys and of context are written, then merged to one.
    assert kv.cache_bytes == 2 * ((500 + 1000) * 64 * 2 + (2 + 2 + 1) * 50 * partial)
    for work in (q, kv):
        assert work.attention_flops == 2 * pairs / 2 * 8 * 16 * 4
        assert work.weight_bytes == (1000 + 6400) * 2
        assert work.linear_flops == 2 * (50 * 1000 + 0.5 * 6400)


def test_only_keys_that_come_in_pieces_are_merged() -> None:
    """Per piece of context a partial is written, and merged with that of all keys before it."""
    costs, partial = model(), 8 * (16 + 1) * 4
    copied = [costs.owner_kv(chunk(100, context)).cache_bytes for context in (0, 1, costs.workspace_tokens + 1)]
    of_keys = [2 * 1.5 * context * 64 * 2 for context in (0, 1, costs.workspace_tokens + 1)]
    assert [a - b for a, b in zip(copied, of_keys, strict=True)] == [
        2 * 50 * partial * (1 + 4 * pieces) for pieces in (0, 1, 2)
    ]
    everywhere = model(tp=2, pcp=2, dcp=4).replicated(StepFacts(decode_rows=3, decode_context=0))
    # Four heads of a rank: both TP members' are attended, four shards' partials merged to one.
    assert everywhere.cache_bytes == 2 * 3 * (2 + 4 + 1) * partial / 2
    assert model(tp=1, pcp=1, dcp=1).replicated(StepFacts(decode_rows=3, decode_context=0)).cache_bytes == 0


def test_a_gather_of_kv_takes_a_round_per_workspace() -> None:
    costs = model()
    assert costs.workspace_tokens == 32 * 2**20 // (64 * 2)
    rounds = [costs.owner_kv(chunk(8, costs.workspace_tokens * k + more)).rounds for k in (0, 1, 2) for more in (0, 1)]
    assert rounds == [2 * (1 + pieces) for pieces in (0, 1, 1, 2, 2, 3)]


def test_keys_of_decode_rows_come_with_those_of_the_prefill_rows() -> None:
    """3 decode rows over 2 replicas, 300 tokens behind them: the fuller replica attends two thirds of their pairs."""
    costs = model()
    alone, beside = costs.owner_kv_all(StepFacts(3, 300)), costs.owner_kv_all(chunk(100, 1000, 3, 300))
    assert (alone.rounds, beside.rounds) == (2 * (1 + 1), 2 * (1 + 1))
    assert alone.wire_bytes == 2 * (1.5 + 150) * 64 * 2
    assert beside.wire_bytes == 2 * (51.5 + 650) * 64 * 2
    assert alone.attention_flops == 2 * 303 * 2 / 3 * 8 * 16 * 4
    assert beside.attention_flops == alone.attention_flops + costs.owner_kv(chunk(100, 1000)).attention_flops
    assert alone.linear_flops == costs.owner_kv(StepFacts(3, 300)).linear_flops
    assert costs.owner_kv_all(chunk(100, 1000)) == costs.owner_kv(chunk(100, 1000))


def test_prompts_that_are_everywhere_are_not_gathered_again() -> None:
    costs = model(dcp=1)
    assert costs.owner_kv(chunk(8, 0)).wire_bytes == costs.owner_kv(chunk(8, 9000)).wire_bytes == 2 * 4 * 64 * 2
    decode = costs.owner_kv(StepFacts(decode_rows=4, decode_context=400))
    assert (decode.rounds, decode.wire_bytes) == (0, 0)
    assert decode.cache_bytes == 2 * 200 * 64 * 2


def test_decode_rows_cost_their_owner_alone() -> None:
    costs, facts = model(), StepFacts(decode_rows=4, decode_context=400)
    owner, everywhere = costs.owner_kv(facts), costs.replicated(facts)
    assert owner == costs.owner_q(facts)
    assert owner.linear_flops == everywhere.linear_flops / 2
    assert (owner.rounds, everywhere.rounds) == (2 * 2, 2 * 1)
    assert owner.attention_flops == everywhere.attention_flops


def test_sums_over_tensor_parallel_members_are_counted_once() -> None:
    facts, costs = StepFacts(decode_rows=4, decode_context=400), model(tp=2, pcp=2, dcp=4)
    assert costs.owner_kv(facts) == costs.owner_q(facts)
    assert costs.owner_kv(facts).rounds == 2 * (2 + 2)


def test_a_sum_over_many_ranks_brings_all_of_each_other_one_unless_it_is_large() -> None:
    """Eight TP members, rows of 64 numbers in bf16, two layers of two sums; from 256 KiB on chunks are summed and gathered."""
    costs, most = model(tp=8, pcp=1, dcp=1), 256 * 1024 // 128
    received = [costs.replicated(chunk(rows, 0)).wire_bytes for rows in (3, most - 1, most)]
    assert received == [2 * 2 * 7 * 3 * 128, 2 * 2 * 7 * (most - 1) * 128, 2 * 2 * 2 * 7 / 8 * most * 128]
    alone = StepFacts(decode_rows=1)
    of_one, of_eight = (model(pcp=pcp, dcp=1).split(alone).wire_bytes for pcp in (2, 8))
    gathered = (8 * 16 + 2 * 2 * 16) * 2
    assert (of_one, of_eight) == (2 * (gathered / 2 + 2 * 128), 2 * (gathered * 7 / 8 + 2 * 7 * 128))


def test_a_merge_of_two_collectives_brings_everybodys_log_sum_exps() -> None:
    """Of rows and heads that another member has: 4 heads of a rank, 3 others in the DCP group, 2 TP members."""
    one = model(tp=2, pcp=2, dcp=4)
    two, lone, dealt = replace(one, merge_rounds=2), StepFacts(decode_rows=1), chunk(8, 0)
    assert two.replicated(lone).wire_bytes == one.replicated(lone).wire_bytes + 2 * 3 * 4 * 4 * (2 - 1)
    assert two.owner_q(dealt).wire_bytes == one.owner_q(dealt).wire_bytes + 2 * 3 * 4 * 4 * 4 * (4 - 1)
    assert model(pcp=2, dcp=2).replicated(lone) == replace(model(pcp=2, dcp=2), merge_rounds=2).replicated(lone)._replace(
        rounds=2 * 1
    )


def test_one_replica_gathers_no_new_keys() -> None:
    """What its TP members need of each other is the context."""
    costs = model(LATENT, tp=2, pcp=1, dcp=2)
    assert [costs.owner_kv(chunk(8, context)).rounds for context in (0, 9)] == [2 * 2, 2 * (2 + 1)]


def test_a_merge_of_two_collectives_takes_a_round_more() -> None:
    one, facts = model(tp=2, pcp=2, dcp=4), chunk(8, 9, 2, 30)
    two = replace(one, merge_rounds=2)
    for way in ("owner_q", "owner_kv", "replicated", "split"):
        assert getattr(two, way)(facts).rounds == getattr(one, way)(facts).rounds + 2
    assert two.owner_kv_all(facts) == one.owner_kv_all(facts)


def test_decode_rows_that_do_not_divide_cost_the_fuller_replica() -> None:
    costs = model()
    three, four = (costs.owner_q(StepFacts(decode_rows=rows)) for rows in (3, 4))
    assert three.linear_flops == four.linear_flops


def test_decode_rows_beside_a_prefill_are_exchanged_once() -> None:
    costs, both = model(), chunk(100, 1000, 4, 400)
    assert costs.owner_q(both).rounds == 2 * 2
    assert costs.owner_kv(both).rounds == 2 * (1 + 1 + 2)
    assert costs.owner_kv(both).linear_flops == costs.owner_q(both).linear_flops


def test_a_split_step_reads_each_weight_once_per_group() -> None:
    costs, facts = model(pcp=4, dcp=4), StepFacts(decode_rows=1, decode_context=100)
    split, everywhere = costs.split(facts), costs.replicated(facts)
    assert split.weight_bytes == everywhere.weight_bytes / 4
    assert split.rounds == 2 * 4
    assert model(tp=2, pcp=2, dcp=4).split(facts).rounds == 2 * 5
    assert split.attention_flops == everywhere.attention_flops


@given(st.integers(1, 4000), st.integers(0, 100_000), st.integers(0, 9), st.sampled_from([(2, 2), (3, 3), (4, 4), (2, 1)]))
def test_work_is_never_negative_and_grows_with_the_context(new: int, context: int, decode: int, shape: tuple[int, int]) -> None:
    costs = model(pcp=shape[0], dcp=shape[1])
    ways = [costs.owner_kv, costs.replicated] + ([costs.owner_q, costs.owner_kv_all] if shape[1] > 1 else [])
    for way in ways:
        less, more = way(chunk(new, context, decode, decode * 50)), way(chunk(new, context + 1000, decode, decode * 50))
        assert all(0 <= a <= b for a, b in zip(less, more, strict=True))


def test_seconds_are_the_sum_over_kinds_of_work() -> None:
    assert seconds(Work(1, 2, 3, 4, 5, 6, 7), Rates(1, 10, 100, 1000, 10000, 100000, 1000000)) == 7654321
    assert seconds(NO_LINK, Rates(0, 0, 0, 0, 0, 1, 1)) == 0


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(LayoutError, match="int8"):
        model(kv_dtype="int8")


def test_latents_that_have_come_are_expanded_where_that_is_less_work() -> None:
    """Absorbed 48 + 16 + 48 multiplications per head and pair; expanded 32 + 16, and 48 · 32 once per latent."""
    costs = model(LATENT)
    few, many = chunk(4, 1000), chunk(400, 1000)
    assert costs.owner_kv(few).attention_flops == 2 * 2 * 8 * few.prefill_pairs / 2 * 112
    assert costs.owner_kv(many).attention_flops == 2 * 2 * 8 * (many.prefill_pairs / 2 * 48 + 1400 * 48 * 32)
    assert costs.owner_q(many).attention_flops == 2 * 2 * 8 * many.prefill_pairs / 2 * 112
