import pytest

from coordinator.plan import NOTHING_CHOSEN, DecodeMode, Gather, Sampling
from coordinator.request import Request, State
from coordinator.scheduler import QueueFull, SchedulerConfig, StepOrderError
from cp_layout.interleave import Layout
from tests.coordinator.oracle import Cluster, run_alone

ONE = Layout(1, 4, 4)
FOUR = Layout(4, 4, 4)


def chunks(cluster: Cluster, request: Request) -> list[tuple[int, int]]:
    """(start, length) of every row of the request so far."""
    rows = [row for step in cluster.steps for row in step.rows if row.handle == request.handle]
    return [(row.start, len(row.token_ids)) for row in rows]


def test_a_request_is_prefilled_decoded_and_released():
    cluster = Cluster(ONE, 10)
    request = cluster.add([1, 2, 3, 4, 5], 3)
    cluster.drain()
    cluster.check_output(request)
    assert chunks(cluster, request) == [(0, 5), (5, 1), (6, 1)]
    assert cluster.steps[-1].rows == ()
    assert cluster.steps[-1].released == (request.handle,)


def test_nothing_to_do_is_no_step():
    cluster = Cluster(ONE, 10)
    assert cluster.scheduler.schedule() is None
    cluster.add([1])
    cluster.drain()
    assert cluster.scheduler.schedule() is None


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 64])
def test_a_prompt_is_cut_by_the_budget_and_only_its_last_chunk_samples(budget):
    cluster = Cluster(FOUR, 10, max_num_batched_tokens=budget)
    request = cluster.add(list(range(20)), 3)
    cluster.drain()
    cluster.check_output(request)
    starts = [start for start, _ in chunks(cluster, request)]
    assert starts == [*range(0, 20, budget), 20, 21]


def test_decodes_go_on_beside_a_long_prefill_also_when_it_is_older():
    cluster = Cluster(ONE, 100, max_num_batched_tokens=8)
    long = cluster.add(list(range(40)), 1)
    cluster.step()
    short = cluster.add([1], 10)
    cluster.step()
    assert [len(row.token_ids) for row in cluster.steps[-1].rows] == [8]
    cluster.drain()
    assert chunks(cluster, long) == [(start, 8) for start in range(0, 40, 8)]
    late = Cluster(ONE, 100, max_num_batched_tokens=8)
    short = late.add([1], 10)
    late.step()
    long = late.add(list(range(40)), 1)
    late.step()
    assert [len(row.token_ids) for row in late.steps[-1].rows] == [1, 7]
    late.drain()
    late.check_output(short)
    assert len(chunks(late, long)) == 6


def test_the_oldest_prefill_is_not_starved_by_as_many_decodes_as_the_budget():
    cluster = Cluster(ONE, 100, max_num_batched_tokens=4)
    old = cluster.add(list(range(6)), 2)
    young = [cluster.add([i], 20) for i in range(4)]
    cluster.drain()
    assert chunks(cluster, old)[0] == (0, 4)
    assert cluster.steps.index(next(s for s in cluster.steps if old.handle in s.released)) < 5
    for request in [old, *young]:
        cluster.check_output(request)


def test_seats_and_queue_are_bounded_and_first_come_is_first_served():
    cluster = Cluster(ONE, 100, max_num_seqs=2, max_waiting=3)
    requests = [cluster.add([i], 2) for i in range(3)]
    with pytest.raises(QueueFull, match="3 requests are waiting, the limit is 3"):
        cluster.add([9])
    cluster.step()
    assert [row.handle for row in cluster.steps[0].rows] == [1, 2]
    assert (cluster.scheduler.running, cluster.scheduler.waiting) == (2, 1)
    cluster.add([9])
    cluster.drain()
    assert [a.handle for step in cluster.steps for a in step.admitted] == [1, 2, 3, 4]
    for request in requests:
        cluster.check_output(request)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_waiting"])
def test_bounds_below_one_are_refused(name):
    bounds = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_waiting": 1}
    assert SchedulerConfig(**bounds)
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        SchedulerConfig(**{**bounds, name: 0})


@pytest.mark.parametrize("layout", [ONE, FOUR], ids=str)
def test_g1_a_request_that_needs_the_whole_pool_runs_and_a_larger_one_is_refused(layout):
    capacity = 3 * layout.virtual_block_size
    cluster = Cluster(layout, 3)
    with pytest.raises(ValueError, match="can never run in 3 blocks per member"):
        cluster.scheduler.add(Request(1, "r", [1] * 8, Sampling(max_tokens=capacity - 6)))
    request = cluster.add([1] * 8, capacity - 7)
    after = cluster.add([1], 1)
    cluster.drain()
    cluster.check_output(request)
    cluster.check_output(after)


def test_g1_empty_prompts_and_handles_in_use_are_refused():
    cluster = Cluster(ONE, 3)
    with pytest.raises(ValueError, match="0 prompt tokens"):
        cluster.scheduler.add(Request(1, "r", [], Sampling(max_tokens=1)))
    request = cluster.add([1, 2], 3)
    with pytest.raises(ValueError, match="request 1 is already scheduled"):
        cluster.scheduler.add(request)
    cluster.step()
    with pytest.raises(ValueError, match="request 1 is already scheduled"):
        cluster.scheduler.add(request)


def test_stop_token_ids_end_a_request_and_are_banned_before_min_tokens():
    prompt = [4, 5, 6]
    first = run_alone(prompt, Sampling(max_tokens=9))[0]
    stop = (first[3],)
    cluster = Cluster(ONE, 10)
    plain = cluster.add(prompt, 9, stop_token_ids=stop)
    patient = cluster.add(prompt, 9, stop_token_ids=tuple(first), min_tokens=5)
    cluster.drain()
    assert (plain.output, plain.finish_reason) == (first[: first.index(stop[0]) + 1], "stop")
    cluster.check_output(patient)
    assert not set(patient.output[:5]) & set(first)
    bans = [row.ban_stop for step in cluster.steps for row in step.rows if row.handle == patient.handle]
    assert bans == [row < 5 for row in range(len(bans))]


def test_a_stop_token_at_the_last_position_is_a_stop():
    prompt = [4, 5, 6]
    last = run_alone(prompt, Sampling(max_tokens=2))[0][1]
    cluster = Cluster(ONE, 10)
    request = cluster.add(prompt, 2, stop_token_ids=(last,))
    cluster.drain()
    assert request.finish_reason == "stop"


def test_only_one_step_is_in_flight():
    cluster = Cluster(ONE, 10)
    cluster.add([1], 3)
    step = cluster.dispatch()
    with pytest.raises(StepOrderError, match="already in flight"):
        cluster.scheduler.schedule()
    cluster.commit(step)
    with pytest.raises(StepOrderError, match="not the one in flight"):
        cluster.scheduler.commit(step, cluster.sampled)
    cluster.drain()


@pytest.mark.parametrize(
    ("sampled", "failed"),
    [({}, {}), ({1: 5}, {}), ({1: 5, 2: 5, 3: 5}, {}), ({1: 5, 2: 5, 9: 5}, {}), ({1: 5, 2: 5}, {9: "x"})],
)
def test_results_that_do_not_match_the_step_change_nothing(sampled, failed):
    cluster = Cluster(ONE, 10, max_num_batched_tokens=6)
    requests = [cluster.add([1, 2], 2), cluster.add([3], 2), cluster.add([4] * 6, 2)]
    step = cluster.dispatch()
    with pytest.raises(ValueError, match="the step draws for"):
        cluster.scheduler.commit(step, sampled, failed)
    cluster.commit(step)
    cluster.drain()
    for request in requests:
        cluster.check_output(request)


def test_a_failed_row_ends_its_own_request_only_and_is_not_cached():
    cluster = Cluster(ONE, 10)
    bad, good = cluster.add([1] * 9, 3), cluster.add([2] * 9, 3)
    step = cluster.dispatch()
    progress = cluster.commit(step, {bad.handle: "logits are not finite"})
    assert [(p.handle, p.new_token is None, p.finished, p.error) for p in progress] == [
        (bad.handle, True, "error", "logits are not finite"),
        (good.handle, False, None, None),
    ]
    assert (bad.state, bad.error) == (State.FINISHED, "logits are not finite")
    again = cluster.add([1] * 9, 3)
    cluster.drain()
    assert again.num_cached_tokens == 0
    cluster.check_output(good)


def test_failing_all_ends_everything_and_forgets_blocks_and_prefixes():
    cluster = Cluster(ONE, 10, max_num_seqs=2)
    done = cluster.add([1] * 9, 1)
    cluster.step()
    requests = [cluster.add([i] * 9, 4) for i in range(3)]
    late = cluster.dispatch()
    assert late.released == (done.handle,)
    cluster.scheduler.abort(requests[1].handle)
    assert cluster.scheduler.fail_all("rank 1 was lost") == [r.handle for r in requests]
    assert [r.finish_reason for r in requests] == ["error", "abort", "error"]
    assert [r.error for r in requests] == ["rank 1 was lost", None, "rank 1 was lost"]
    assert done.finish_reason == "length"
    cluster.check_idle()
    assert cluster.scheduler.schedule() is None
    with pytest.raises(StepOrderError):
        cluster.scheduler.commit(late, cluster.sampled)
    cluster.ranks.reset()
    again = cluster.add([1] * 9, 4)
    cluster.drain()
    assert again.num_cached_tokens == 0
    cluster.check_output(again)


def test_releases_that_the_ranks_never_heard_of_are_forgotten_with_a_lost_rank():
    cluster = Cluster(ONE, 10)
    cluster.add([1], 1)
    cluster.step()
    cluster.scheduler.fail_all("rank 1 was lost")
    assert cluster.scheduler.schedule() is None


def test_a_stop_token_before_min_tokens_ends_nothing():
    """A rank that did not mask it has made a mistake, but the request asked for more tokens."""
    cluster = Cluster(ONE, 10)
    request = cluster.add([1], 9, stop_token_ids=(5,), min_tokens=2)
    for ends in (None, None, "stop"):
        (progress,) = cluster.scheduler.commit(cluster.scheduler.schedule(), {request.handle: 5})
        assert (progress.new_token, progress.finished) == (5, ends)


def test_decode_rows_do_not_grow_with_the_context():
    cluster = Cluster(Layout(2, 4, 4), 600, max_num_batched_tokens=4096)
    requests = [cluster.add(list(range(16)), 40), cluster.add(list(range(4000)), 40)]
    cluster.drain()
    for request in requests:
        rows = [row for step in cluster.steps for row in step.rows if row.handle == request.handle][1:]
        assert {len(row.token_ids) for row in rows} == {1}
        assert max(sum(map(len, row.new_blocks)) for row in rows) == 1
        assert sum(sum(map(len, row.new_blocks)) for row in rows) == 10


@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_a6_the_shards_of_a_growing_request_stay_even(interleave):
    layout = Layout(4, interleave, 4)
    cluster = Cluster(layout, 20)
    cluster.add([1], 8 * interleave * 4)
    while cluster.step() is not None:
        held = cluster.scheduler.table_blocks
        assert max(held) - min(held) <= 1
    assert max(max(row.new_blocks) for step in cluster.steps for row in step.rows if row.new_blocks)


def test_short_requests_start_on_different_members():
    """Otherwise the first member would fill up while the others stay empty."""
    cluster = Cluster(FOUR, 2, max_num_seqs=8)
    for index in range(8):
        cluster.add([index], 3)
    cluster.step()
    assert cluster.scheduler.free_blocks == (0, 0, 0, 0)
    assert cluster.scheduler.running == 8
    cluster.drain()


def test_a_step_says_how_it_is_to_be_computed():
    cluster = Cluster(FOUR, 10)
    cluster.add([1, 2, 3])
    step = cluster.scheduler.schedule()
    assert (step.decode_mode, step.gather, step.cost_version) == (DecodeMode.REPLICATED, Gather.NONE, NOTHING_CHOSEN)
