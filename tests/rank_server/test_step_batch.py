"""From plan to view: what one rank makes of the message that all ranks get."""

from functools import partial

import pytest
import torch

from cp_layout.interleave import Layout
from cp_wire.pb import common_pb2, rank_pb2
from rank_server.attention.rows import attention_batch
from rank_server.sequences import PlanRefused, SequenceTable
from rank_server.share import replicated
from rank_server.step_batch import RowScores, build, commit, hold, keep_history, take_in
from tests.devices import CPU

LAYOUT = Layout(num_shards=2, interleave=2, block_size=4)


def plan_with(*rows: rank_pb2.StepRow, admitted: dict[int, dict] | None = None, released=()) -> rank_pb2.StepPlan:
    return rank_pb2.StepPlan(
        released=released,
        admitted=[
            rank_pb2.AdmittedRequest(handle=handle, sampling=common_pb2.SamplingParams(**fields.pop("sampling", {})), **fields)
            for handle, fields in (admitted or {}).items()
        ],
        rows=rows,
    )


def row(handle: int, start: int, tokens: list[int], blocks: list[list[int]] | None = None, **fields) -> rank_pb2.StepRow:
    return rank_pb2.StepRow(
        handle=handle,
        start=start,
        token_ids=tokens,
        new_block_ids=[i for ids in blocks or [] for i in ids],
        new_block_counts=[len(ids) for ids in blocks or []],
        **fields,
    )


def run(plan: rank_pb2.StepPlan, table: SequenceTable, member: int):
    """The batch of a replica that computes all rows, and what attention needs to know of it."""
    take_in(plan, table, LAYOUT, member)
    rows = hold(plan, table, LAYOUT, member)
    share = replicated(rows, 1, 0)
    batch = build(plan, table, share, CPU)
    attention = attention_batch(rows, share.spans, LAYOUT, CPU)
    commit(plan, table)
    return batch, attention


@pytest.mark.parametrize("member", [0, 1])
def test_chunk_then_decode_slots_and_visible_lengths(member):
    """Positions 0 1 | 2 3 | 4 belong to shards 0, 1, 0; blocks 7 (member 0) and 9 (member 1)."""
    table = SequenceTable()
    batch, attention = run(plan_with(row(1, 0, [10, 11, 12, 13], [[7], [9]]), admitted={1: {}}), table, member)
    assert attention.slots.tolist() == [[28, 29, -1, -1], [-1, -1, 36, 37]][member]
    assert attention.visible.tolist() == [[1, 2, 2, 2], [0, 0, 1, 2]][member]
    assert batch.positions.tolist() == [0, 1, 2, 3]
    assert batch.answered.tolist() == []
    batch, attention = run(plan_with(row(1, 4, [14], sample=True, output_index=3)), table, member)
    assert attention.slots.tolist() == [[30], [-1]][member]
    assert attention.visible.tolist() == [[3], [2]][member]
    assert batch.sample_rows.tolist() == [0]
    assert batch.answered is None
    assert batch.draws[0].output_index == 3


def test_shard_offset_moves_the_first_shard_to_another_member():
    table = SequenceTable()
    _, attention = run(plan_with(row(1, 0, [5, 6, 7], [[4], [8]]), admitted={1: {"shard_offset": 1}}), table, member=1)
    assert attention.slots.tolist() == [32, 33, -1]
    assert attention.rows[0].block_table.tolist() == [8]


def test_rows_of_several_requests_lie_one_after_the_other():
    table = SequenceTable()
    batch, attention = run(
        plan_with(
            row(1, 0, [1, 2, 3], [[0], [0]], sample=True),
            row(2, 4, [9, 9], [[1], [1]], sample=True),
            admitted={1: {}, 2: {"num_cached_tokens": 4}},
        ),
        table,
        member=0,
    )
    assert [(r.q_start, r.q_len, r.first_visible, r.local_len) for r in attention.rows] == [(0, 3, 1, 2), (3, 2, 3, 4)]
    assert batch.sample_rows.tolist() == [2, 4]
    assert batch.answered.tolist() == [2, 4]
    assert batch.draw_handles == (1, 2)


def test_ban_and_top_p_zero_is_off():
    table = SequenceTable()
    sampling = {"temperature": 0.5, "top_p": 0.0, "stop_token_ids": [3, 4]}
    batch, _ = run(
        plan_with(row(1, 0, [1], [[0], []], sample=True, ban_stop=True), admitted={1: {"sampling": sampling}}), table, 0
    )
    assert batch.draws[0].ban == (3, 4)
    assert batch.draws[0].top_p == 1.0
    batch, _ = run(plan_with(row(1, 1, [1], sample=True)), table, 0)
    assert batch.draws[0].ban == ()


def test_the_smallest_top_p_is_not_off():
    table = SequenceTable()
    sampling = {"temperature": 1e-300, "top_p": 1e-300}
    batch, _ = run(plan_with(row(1, 0, [1], [[0], []], sample=True), admitted={1: {"sampling": sampling}}), table, 0)
    assert (batch.draws[0].top_p, batch.draws[0].temperature) == (1e-300, 1e-300)


def test_tables_grow_past_their_first_allocation():
    table = SequenceTable()
    ids = list(range(100, 150))
    _, attention = run(plan_with(row(1, 0, [1], [ids, []]), admitted={1: {}}), table, 0)
    assert attention.rows[0].block_table.tolist() == ids
    run(plan_with(row(1, 1, [1], [[7], []])), table, 0)
    assert table.get(1).block_table.tolist() == [*ids, 7]
    assert table.blocks_in_use == 51


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_with(row(9, 0, [1], [[0], []])), "request 9 is not known"),
        (plan_with(row(1, 5, [1])), "start at 5, the rank holds 0"),
        (plan_with(row(1, 0, [])), "0 tokens start at 0"),
        (plan_with(row(1, 0, [1, 2, 3], [[0]])), "do not match 2 members"),
        (plan_with(row(1, 0, [1], [[], []])), "need 1 blocks on shard 0, its table has 0"),
        (plan_with(admitted={1: {}}), "request 1 is admitted twice"),
        (plan_with(released=[4]), "request 4 is released but not known"),
    ],
)
def test_contradictions_are_refused_by_name(plan, words):
    table = SequenceTable()
    take_in(plan_with(admitted={1: {}}), table, LAYOUT, 0)
    with pytest.raises(PlanRefused, match=words):
        run(plan, table, 0)


def test_release_then_admit_in_one_plan_starts_afresh():
    table = SequenceTable()
    run(plan_with(row(1, 0, [1, 2], [[3], []]), admitted={1: {}}), table, 0)
    run(plan_with(row(1, 0, [1], [[5], []]), admitted={1: {}}, released=[1]), table, 0)
    assert table.get(1).block_table.tolist() == [5]


def view(plan: rank_pb2.StepPlan, table: SequenceTable):
    return build(plan, table, replicated(hold(plan, table, LAYOUT, 0), 1, 0), CPU)


def history(tokens: list[int], cached: int = 0, **fields) -> dict:
    sampling = {"frequency_penalty": 1.0}
    return {"sampling": sampling, "num_prompt_tokens": 3, "num_cached_tokens": cached, "cached_token_ids": tokens, **fields}


def test_only_requests_with_penalties_have_a_history_and_it_counts_each_token_once():
    table = SequenceTable()
    keep = partial(keep_history, vocab_size=6, device=CPU)
    plan = plan_with(
        row(1, 2, [4, 5], [[0, 1], [0]], sample=True), row(2, 0, [1, 1]), admitted={1: history([1, 2], cached=2), 2: {}}
    )
    take_in(plan, table, LAYOUT, 0, keep)
    table.get(2).append_blocks([7])
    batch = view(plan, table)
    assert table.get(2).history is None
    assert batch.draws[0].history.penalised(torch.zeros(6)).tolist() == [0, 0, 0, 0, 0, -1], "position 3 is output"
    commit(plan, table)
    batch = view(plan_with(row(1, 4, [5], [[], []], sample=True)), table)
    assert batch.draws[0].history.penalised(torch.zeros(6)).tolist() == [0, 0, 0, 0, 0, -2]


def test_ranks_that_do_not_draw_keep_no_history():
    table = SequenceTable()
    run(plan_with(row(1, 0, [1], [[0], []]), admitted={1: history([])}), table, 0)
    assert table.get(1).history is None


def test_a_history_without_its_cached_tokens_is_refused():
    keep = partial(keep_history, vocab_size=6, device=CPU)
    plan = plan_with(admitted={1: history([1], cached=2)})
    with pytest.raises(PlanRefused, match="request 1: 2 tokens are cached, 1 are named"):
        take_in(plan, SequenceTable(), LAYOUT, 0, keep)


@pytest.mark.parametrize(("start", "count", "first"), [(1, 3, 0), (2, 1, 1), (3, 1, 2)])
def test_scored_tokens_find_the_row_before_them(start, count, first):
    table = SequenceTable()
    scored = {"score_start": start, "score_token_ids": [7] * count}
    sampling = {"prompt_logprobs": 4}
    batch, _ = run(plan_with(row(1, 0, [5, 6, 7], [[0], [0]], **scored), admitted={1: {"sampling": sampling}}), table, 0)
    assert batch.scores == (RowScores(handle=1, start=start, first=first, token_ids=(7,) * count, top=4),)
    assert batch.most_scored == count
    assert [*batch.scores[0].rows] == [*range(first, first + count)]
    assert (batch.answered is None) is (count == 3) and (count == 3 or batch.answered.tolist() == [first])


@pytest.mark.parametrize(("start", "count"), [(0, 1), (1, 4), (4, 1)])
def test_tokens_that_the_row_cannot_score_are_refused(start, count):
    plan = plan_with(row(1, 0, [5, 6, 7], [[0], [0]], score_start=start, score_token_ids=[7] * count), admitted={1: {}})
    with pytest.raises(PlanRefused, match=f"tokens 0 to 3 can't score {count} tokens from {start}"):
        run(plan, SequenceTable(), 0)
