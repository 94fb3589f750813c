"""Preemption, aborts and the prefix cache as the scheduler uses it."""

import pytest

from coordinator.kv_blocks import KvBlocks
from coordinator.request import State
from cp_layout.interleave import Layout
from tests.coordinator.oracle import Cluster, run_alone

ONE = Layout(1, 4, 4)
LAYOUTS = [Layout(1, 4, 4), Layout(2, 4, 4), Layout(2, 1, 4), Layout(4, 2, 4), Layout(3, 4, 4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("budget", [2, 5, 64])
def test_e2_a_preempted_request_goes_on_where_it_was(layout, budget):
    v = layout.virtual_block_size
    cluster = Cluster(layout, 6, max_num_batched_tokens=budget)
    requests = [cluster.add([i + 1] * (v + 1), 4 * v) for i in range(4)]
    cluster.drain()
    assert sum(request.num_preemptions for request in requests) > 0
    assert requests[0].num_preemptions == 0
    for request in requests:
        cluster.check_output(request)


def test_e2_the_youngest_gives_way_and_is_the_first_to_come_back():
    cluster = Cluster(ONE, 6)
    requests = [cluster.add([i] * 5, 12) for i in range(3)]
    cluster.add([9], 1)
    cluster.step()
    while requests[2].state is State.RUNNING:
        cluster.step()
    step = cluster.steps[-1]
    assert step.released == (3,)
    assert requests[2].num_computed == 0
    assert [row.handle for row in step.rows] == [1, 2]
    cluster.drain()
    order = [admission.handle for step in cluster.steps for admission in step.admitted]
    assert order.index(4) > len(order) - 1 - order[::-1].index(3), "the queue is still in order of arrival"


def test_a_step_that_preempts_admits_nobody():
    """The young request has to leave member 0, and there is room for it on member 1, where it goes one step later."""
    cluster = Cluster(Layout(2, 4, 4), 2)
    old, young = cluster.add([1] * 8, 3), cluster.add([2], 4)
    cluster.step()
    assert young.shard_offset == 0
    step = cluster.step()
    assert (step.released, step.admitted) == ((young.handle,), ())
    step = cluster.step()
    assert [(a.handle, a.shard_offset) for a in step.admitted] == [(young.handle, 1)]
    cluster.drain()
    cluster.check_output(old)
    cluster.check_output(young)


def test_e2_a_resumed_request_draws_with_its_next_output_index():
    cluster = Cluster(ONE, 6)
    requests = [cluster.add([i] * 5, 12) for i in range(3)]
    cluster.drain()
    for request in requests:
        draws = [row.output_index for step in cluster.steps for row in step.rows if row.handle == request.handle and row.sample]
        assert draws == list(range(12))


def test_f11_recomputation_is_neither_a_query_nor_a_hit():
    cluster = Cluster(ONE, 6)
    requests = [cluster.add([10 * i + k for k in range(5)], 12) for i in range(3)]
    cluster.drain()
    stats = cluster.scheduler.stats
    assert stats.preemptions == sum(r.num_preemptions for r in requests) > 0
    assert (stats.queried_tokens, stats.hit_tokens) == (15, 0)
    assert stats.recomputed_tokens == sum(r.num_recomputed for r in requests) > 0
    rows = sum(len(row.token_ids) for step in cluster.steps for row in step.rows)
    assert rows == sum(len(r.prompt) + len(r.output) - 1 for r in requests) + stats.recomputed_tokens


def test_e1_a_prefix_hit_is_taken_off_before_tokens_are_scheduled():
    cluster = Cluster(Layout(2, 4, 4), 20)
    cluster.add(list(range(13)), 1)
    cluster.drain()
    again = cluster.add(list(range(13)), 1)
    step = cluster.step()
    assert step.admitted[0].num_cached_tokens == again.num_cached_tokens == 8
    assert (step.rows[0].start, step.rows[0].token_ids) == (8, tuple(range(8, 13)))
    assert [len(blocks) for blocks in step.rows[0].new_blocks] in ([2, 2], [1, 3], [3, 1])
    assert cluster.scheduler.stats.hit_tokens == 8
    cluster.drain()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_f2_generated_tokens_are_found_again_in_the_next_turn(layout):
    v = layout.virtual_block_size
    cluster = Cluster(layout, 40)
    first = cluster.add(list(range(v - 1)), 2 * v)
    cluster.drain()
    second = cluster.add(first.prompt + first.output + [1, 2], 3)
    cluster.drain()
    assert second.num_cached_tokens == 2 * v
    cluster.check_output(second)


def test_f1_outputs_do_not_depend_on_the_cache():
    cluster = Cluster(Layout(2, 4, 4), 40)
    first = cluster.add([7] * 9 + [1] * 20, 5)
    cluster.drain()
    second = cluster.add([7] * 9 + [2] * 20, 5)
    cluster.drain()
    assert second.num_cached_tokens == 8
    cluster.check_output(first)
    cluster.check_output(second)


def test_h6_requests_aborted_before_they_ever_ran_vanish():
    cluster = Cluster(ONE, 10, max_num_seqs=1)
    requests = [cluster.add([i], 3) for i in range(20)]
    cluster.step()
    for request in requests[1:]:
        cluster.scheduler.abort(request.handle)
    last = cluster.add([30], 3)
    cluster.drain()
    for request in (requests[0], last):
        cluster.check_output(request)
    told = {a.handle for s in cluster.steps for a in s.admitted} | {h for s in cluster.steps for h in s.released}
    assert told == {requests[0].handle, last.handle}
    assert {r.finish_reason for r in requests[1:]} == {"abort"}
    assert set(cluster.ended) == told


def test_an_abort_between_steps_frees_at_once_and_tells_the_ranks():
    cluster = Cluster(ONE, 10)
    request = cluster.add([1] * 6, 9)
    cluster.step()
    cluster.scheduler.abort(request.handle)
    cluster.scheduler.abort(request.handle)
    assert cluster.scheduler.free_blocks == (10,)
    step = cluster.step()
    assert (step.released, step.rows) == ((request.handle,), ())
    assert cluster.scheduler.schedule() is None


@pytest.mark.parametrize(("reason", "prompt"), [("abort", 6), ("stop", 6), ("abort", 40)])
def test_an_end_in_flight_takes_effect_at_the_commit(reason, prompt):
    """In decode and in the middle of a prefill."""
    cluster = Cluster(ONE, 20, max_num_batched_tokens=16)
    request = cluster.add([1] * prompt, 9)
    cluster.step()
    step = cluster.dispatch()
    held = cluster.scheduler.table_blocks
    cluster.scheduler.finish(request.handle, reason)
    cluster.scheduler.abort(request.handle)
    assert (request.state, cluster.scheduler.table_blocks) == (State.ENDING, held)
    (progress,) = cluster.commit(step)
    assert (progress.handle, progress.new_token, progress.finished) == (request.handle, None, reason)
    assert cluster.scheduler.free_blocks == (20,)
    assert cluster.step().released == (request.handle,)
    assert cluster.scheduler.schedule() is None


def test_a_stop_string_found_after_a_preemption_ends_the_waiting_request():
    cluster = Cluster(ONE, 6)
    requests = [cluster.add([i] * 5, 12) for i in range(3)]
    while requests[2].num_preemptions == 0:
        cluster.step()
    cluster.scheduler.finish(requests[2].handle, "stop")
    assert (requests[2].state, requests[2].finish_reason) == (State.FINISHED, "stop")
    cluster.drain()
    assert [h for s in cluster.steps for h in s.released].count(requests[2].handle) == 1


def test_unknown_and_ended_handles_are_nothing_to_abort():
    cluster = Cluster(ONE, 6)
    request = cluster.add([1], 1)
    cluster.drain()
    cluster.scheduler.abort(request.handle)
    cluster.scheduler.abort(77)
    assert (request.finish_reason, cluster.scheduler.schedule()) == ("length", None)


def test_a_request_is_admitted_only_if_all_its_tokens_fit():
    """Its first chunk alone would fit, and be thrown away when the older request grows."""
    cluster = Cluster(ONE, 10, max_num_batched_tokens=6)
    requests = [cluster.add([1] * 23, 10), cluster.add([2] * 20, 1)]
    cluster.drain()
    assert [r.num_preemptions for r in requests] == [0, 0]


def test_a_queue_that_is_stuck_is_not_looked_at_again_until_blocks_come_back(monkeypatch):
    """Once more after the step that computed a prompt, which it might have shared."""
    looks = []
    place = KvBlocks.place

    def counted(blocks, request):
        looks.append(request.handle)
        return place(blocks, request)

    monkeypatch.setattr(KvBlocks, "place", counted)
    cluster = Cluster(ONE, 10)
    first = cluster.add([1] * 20, 20)
    second = cluster.add([2] * 30, 5)
    cluster.drain()
    assert looks == [first.handle, second.handle, second.handle, second.handle]
    cluster.check_output(second)


def test_a_stuck_head_gets_in_once_the_prompt_that_it_shares_is_computed():
    cluster = Cluster(ONE, 12)
    first = cluster.add([1] * 24, 12)
    second = cluster.add([1] * 24 + [2] * 4, 2)
    cluster.step()
    assert (first.state, second.state) == (State.RUNNING, State.WAITING)
    cluster.step()
    assert (first.state, second.state, second.num_cached_tokens) == (State.RUNNING, State.RUNNING, 24)
    cluster.drain()
    cluster.check_output(second)


def test_a_stuck_head_that_is_aborted_lets_the_next_one_in():
    cluster = Cluster(ONE, 10)
    cluster.add([1] * 20, 20)
    big, small = cluster.add([2] * 30, 5), cluster.add([3], 5)
    cluster.step()
    assert cluster.scheduler.waiting == 2
    cluster.scheduler.abort(big.handle)
    cluster.step()
    assert small.state is State.RUNNING
    cluster.drain()
    assert cluster.tokens[small.handle] == run_alone(small.prompt, small.sampling)[0]
