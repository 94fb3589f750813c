"""What a rank does with a step: refusals, bounds, progress, rows that fail alone; and what a reset forgets."""

import threading

import pytest

from cp_wire.pb import common_pb2
from rank_server.collectives.base import CollectiveError
from rank_server.collectives.local import LocalHub
from rank_server.runs import EVERY_TICKET
from rank_server.sequences import PlanRefused
from tests.rank_server.ranks import DEADLINE_S, open_all, plan, row, serving
from tests.rank_server.threads import run_ranks
from tests.tiny_models import greedy_reference

LAYERS = 2


@pytest.fixture
def pair(files):
    """Two TP members over one open group; what is left open is closed."""
    hub = LocalHub()
    ranks = [serving(files, rank, hub, tp=2) for rank in range(2)]
    open_all([rank.executor for rank in ranks], {"tp:0": [0, 1]})
    yield ranks
    for rank in ranks:
        rank.executor.close_groups()


def test_a_group_is_opened_once(pair):
    with pytest.raises(PlanRefused, match="tp:0 is open already"):
        pair[0].executor.open_group("tp:0", [0, 1], b"", 1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"decode_mode": common_pb2.DECODE_MODE_OWNER},
        {"decode_mode": common_pb2.DECODE_MODE_UNSPECIFIED},
        {"gather": common_pb2.GATHER_KV},
        {"gather": common_pb2.GATHER_UNSPECIFIED},
        {"decode_mode": common_pb2.DECODE_MODE_OWNER, "gather": common_pb2.GATHER_KV_ALL},
    ],
    ids=str,
)
def test_a_way_that_the_rank_does_not_know_is_refused_and_changes_nothing(files, changes):
    executor = serving(files).executor
    with pytest.raises(PlanRefused, match="is not supported"):
        executor.step(plan(row(1, 0, [5], [0]), admitted=[1], **changes))
    assert executor.step(plan(row(1, 0, [5], [0]), admitted=[1])).blocks_in_use == 1


def test_every_layer_of_a_step_reports_progress(files):
    rank = serving(files)
    before = rank.reports
    rank.executor.step(plan(row(1, 0, [5, 6, 7], [0]), admitted=[1]))
    assert rank.reports - before >= LAYERS


def test_m1_the_bound_of_the_plan_reaches_the_groups(pair):
    """The group was opened with 20 s; its peer never comes."""
    step = plan(row(1, 0, [5], [0]), admitted=[1], timeout_ms=50)
    with pytest.raises(CollectiveError, match=r"within 0\.05 s"):
        pair[0].executor.step(step)


def test_m1_groups_closed_by_another_thread_interrupt_a_collective(pair):
    failures = []

    def alone():
        try:
            pair[0].executor.step(plan(row(1, 0, [5], [0]), admitted=[1]))
        except CollectiveError as error:
            failures.append(str(error))

    waiting = threading.Thread(target=alone, daemon=True)
    waiting.start()
    pair[0].executor.close_groups()
    waiting.join(DEADLINE_S / 2)
    assert not waiting.is_alive()
    assert len(failures) == 1


def test_a_reset_forgets_requests_and_groups_and_keeps_weights_and_pool(pair, path):
    executors = [rank.executor for rank in pair]
    prompt = [5, 6, 7]

    def ask(blocks):
        step = plan(row(1, 0, prompt, blocks), admitted=[1])
        return run_ranks(2, lambda rank: executors[rank].step(step))

    (expected,) = greedy_reference(path, prompt, 1)
    first = ask([0])
    assert [token.token_id for token in first[0].sampled] == [expected]
    pools = [executor.pool for executor in executors]
    for executor in executors:
        executor.reset()
    with pytest.raises(PlanRefused, match="group tp:0"):
        executors[0].step(plan(row(1, 0, prompt, [2]), admitted=[1]))
    for executor in executors:
        executor.reset()
    assert executors[0].step(plan()).blocks_in_use == 0
    open_all(executors, {"tp:0": [0, 1]})
    with pytest.raises(PlanRefused, match="1"):
        executors[0].step(plan(row(1, 3, [expected])))
    again = ask([3])
    assert [token.token_id for token in again[0].sampled] == [expected]
    assert [result.blocks_in_use for result in again] == [1, 1]
    assert [executor.pool for executor in executors] == pools


def test_l3_logits_that_are_not_finite_fail_one_row_and_the_rank_lives(files, path):
    executor = serving(files).executor
    prompts = {1: [5, 6, 7], 2: [9, 8, 7]}
    rows = [row(handle, 0, prompt, [handle]) for handle, prompt in prompts.items()]
    first = {token.handle: token.token_id for token in executor.step(plan(*rows, admitted=prompts)).sampled}
    executor.pool.fill_nan([1])
    rows = [row(handle, 3, [token], output_index=1) for handle, token in first.items()]
    sick, well = executor.step(plan(*rows)).sampled
    assert (sick.handle, well.handle) == (1, 2)
    assert "finite" in sick.error and not well.error
    expected = greedy_reference(path, prompts[2], 3)
    assert [first[2], well.token_id] == expected[:2]
    after = executor.step(plan(row(2, 4, [well.token_id], [3], output_index=2), released=[1]))
    assert [token.token_id for token in after.sampled] == expected[2:]
    assert after.blocks_in_use == 2


def test_collectives_of_a_step_are_counted(pair):
    step = plan(row(1, 0, [5], [0]), admitted=[1])
    results = run_ranks(2, lambda rank: pair[rank].executor.step(step))
    assert results[0].collectives == results[1].collectives > 0
    assert all(result.collective_us > 0 for result in results)
    assert results[0].ticket == 7


def test_a_run_ends_after_the_step_that_it_is_in_when_it_or_a_later_one_is_told_to(files):
    executor = serving(files).executor
    executor.step(plan(row(1, 0, [5], [0, 1, 2]), admitted=[1]))

    def steps(start: int, ticket: int) -> int:
        allowed = plan(row(1, start, [5], output_index=start), ahead=2, ticket=ticket)
        return 1 + executor.run(allowed, lambda result, worker_us: None).index

    assert steps(1, 8) == 3
    executor.end_run(7)
    assert steps(4, 8) == 3
    executor.end_run(8)
    executor.end_run(6)
    assert steps(7, 8) == 1
    executor.end_run(EVERY_TICKET)
    assert steps(8, EVERY_TICKET) == 1
    with pytest.raises(ValueError, match="out of range"):
        plan(ticket=EVERY_TICKET + 1)
