"""Steps that ranks take by themselves: when they may, with which blocks, and what an end in their midst means."""

import pytest

from coordinator.request import State
from cp_layout.interleave import Layout
from tests.coordinator.oracle import Cluster, run_alone

LONG = 50
"""More than any run here."""


def decoding(cluster: Cluster, *prompts: list[int], max_tokens: int = LONG, **sampling) -> list:
    """Requests whose prompts have been computed; none is scheduled yet for its second token."""
    requests = [cluster.add(prompt, max_tokens, **sampling) for prompt in prompts]
    while any(not request.output for request in requests):
        cluster.commit(cluster.dispatch())
    return requests


@pytest.mark.parametrize("layout", [Layout(1, 4, 4), Layout(4, 4, 4), Layout(3, 1, 2)])
@pytest.mark.parametrize("limit", [0, 1, 7])
def test_decode_steps_may_go_on_as_far_as_the_limit_and_have_the_blocks_for_it(layout, limit):
    cluster = Cluster(layout, 100, max_ahead=limit)
    decoding(cluster, [1, 2, 3], [4, 5])
    step = cluster.dispatch()
    assert step.ahead == limit
    while step.ahead:
        step = cluster.go_on(step)
        assert not any(row.new_blocks for row in step.rows)
        assert not (step.admitted or step.released)
    cluster.commit(step)
    for request in cluster.requests.values():
        assert request.output == run_alone(request.prompt, request.sampling)[0][: 2 + limit]


def test_facts_of_a_run_follow_its_steps():
    cluster = Cluster(Layout(1, 4, 4), 100, max_ahead=3)
    decoding(cluster, [1, 2, 3], [4, 5])
    first = cluster.dispatch()
    second = cluster.go_on(first)
    assert (second.facts.decode_rows, second.facts.decode_context) == (2, first.facts.decode_context + 2)


def test_a_step_with_a_prompt_goes_no_further():
    cluster = Cluster(Layout(1, 4, 4), 100, max_ahead=7, max_num_batched_tokens=4)
    decoding(cluster, [1])
    cluster.add(list(range(9)), 2)
    assert [cluster.step().ahead for _ in range(3)] == [0, 0, 0]


def test_a_step_goes_no_further_while_somebody_waits_who_may_be_seated():
    """The first one in the queue has not been looked at since somebody gave way."""
    cluster = Cluster(Layout(1, 4, 4), 5, max_ahead=7, max_num_batched_tokens=64)
    decoding(cluster, [1] * 7, [2] * 7, max_tokens=9)
    while not cluster.scheduler.waiting:
        step = cluster.step()
    assert step.ahead == 0 and [len(each.rows) for each in cluster.steps[-2:]] == [2, 1]
    assert cluster.dispatch().ahead > 0


def test_a_queue_that_has_to_wait_for_a_seat_keeps_nobody_from_going_on():
    cluster = Cluster(Layout(1, 4, 4), 100, max_ahead=7, max_num_seqs=1)
    (first,) = decoding(cluster, [1], max_tokens=20)
    second = cluster.add([2], 2)
    aheads = []
    while first.state is not State.FINISHED:
        step = cluster.dispatch()
        aheads.append(step.ahead)
        while step.ahead:
            assert second.state is State.WAITING
            step = cluster.go_on(step)
        cluster.commit(step)
    assert aheads == [7, 7, 2]
    step = cluster.dispatch()
    assert [row.handle for row in step.rows] == [second.handle]


def test_a_queue_that_has_to_wait_for_blocks_keeps_nobody_from_going_on():
    cluster = Cluster(Layout(1, 4, 4), 8, max_ahead=2, max_num_batched_tokens=64)
    (short,), (long,) = decoding(cluster, [1] * 4, max_tokens=5), decoding(cluster, [3] * 4, max_tokens=10)
    big = cluster.add([4] * 20, 2)
    assert cluster.scheduler.may_grow
    step = cluster.dispatch()
    assert step.ahead == 2 and not cluster.scheduler.may_grow
    cluster.commit(cluster.go_on(cluster.go_on(step)))
    assert short.state is State.FINISHED and cluster.scheduler.may_grow
    assert {row.handle for row in cluster.dispatch().rows} == {long.handle, big.handle}


def test_who_comes_first_after_the_one_that_had_to_wait_is_looked_at():
    cluster = Cluster(Layout(1, 4, 4), 8, max_ahead=2, max_num_batched_tokens=64)
    decoding(cluster, [1] * 12, max_tokens=20)
    big, small = cluster.add([4] * 24, 2), cluster.add([5], 2)
    step = cluster.dispatch()
    assert step.ahead == 2 and not cluster.scheduler.may_grow
    cluster.scheduler.abort(big.handle)
    assert cluster.scheduler.may_grow
    cluster.commit(step)
    assert small.handle in {row.handle for row in cluster.dispatch().rows}


def test_a_run_ends_with_the_first_request_that_is_over():
    cluster = Cluster(Layout(1, 4, 4), 100, max_ahead=7)
    decoding(cluster, [1], max_tokens=5)
    decoding(cluster, [2], max_tokens=LONG)
    step = cluster.dispatch()
    left = 5 - len(cluster.requests[1].output)
    assert step.ahead == left - 1
    while step.ahead:
        step = cluster.go_on(step)
    cluster.commit(step)
    assert cluster.ended == {1: "length"}


def test_stop_tokens_stay_banned_or_allowed_within_a_run():
    cluster = Cluster(Layout(1, 4, 4), 100, max_ahead=31)
    decoding(cluster, [1], min_tokens=4, stop_token_ids=(99,))
    step = cluster.dispatch()
    assert step.ahead == 2 and step.rows[0].ban_stop
    cluster.commit(cluster.go_on(cluster.go_on(step)))
    step = cluster.dispatch()
    assert step.ahead == 31 and not step.rows[0].ban_stop


@pytest.mark.parametrize("blocks", [2, 3, 4, 5, 6, 10])
def test_a_run_leaves_every_request_a_block(blocks):
    """One request of 4 tokens in blocks of 4, whose next step needs a second block."""
    cluster = Cluster(Layout(1, 4, 4), blocks, max_ahead=15)
    request = cluster.add([1, 2, 3, 4], 4 * blocks - 3)
    cluster.commit(cluster.dispatch())
    step = cluster.dispatch()
    wished = min(15, request.sampling.max_tokens - 2)
    halved = [wished, wished // 2, wished // 4, wished // 8, 0]
    assert step.ahead == next(ahead for ahead in halved if ahead == 0 or -(-(5 + ahead) // 4) + 1 <= blocks)
    assert cluster.scheduler.free_blocks == (blocks - -(-(5 + step.ahead) // 4),)


@pytest.mark.parametrize("how", ["abort", "stop"])
def test_a_request_that_ends_in_a_run_keeps_its_blocks_until_the_run_is_over(how):
    cluster = Cluster(Layout(2, 2, 2), 100, max_ahead=7)
    ending, other = decoding(cluster, [1, 2, 3], [4, 5])
    step = cluster.go_on(cluster.dispatch())
    cluster.scheduler.finish(ending.handle, how)
    before = cluster.scheduler.free_blocks
    output = list(ending.output)
    for _ in range(3):
        step = cluster.go_on(step)
        assert cluster.scheduler.free_blocks == before and ending.state is State.ENDING
    cluster.commit(step)
    assert cluster.ended == {ending.handle: how} and ending.output == output
    assert all(free > held for free, held in zip(cluster.scheduler.free_blocks, before, strict=True))
    cluster.drain()
    cluster.check_output(other)


def test_a_run_that_ends_early_leaves_its_blocks_for_the_next_one():
    cluster = Cluster(Layout(1, 4, 4), 100, max_ahead=11)
    decoding(cluster, [1, 2, 3, 4])
    cluster.commit(cluster.go_on(cluster.dispatch()))
    step = cluster.dispatch()
    assert [len(blocks) for row in step.rows for blocks in row.new_blocks] == [1]
    cluster.commit(step)
    cluster.drain()


def test_the_ranks_may_not_go_on_where_the_step_does_not_allow_it():
    cluster = Cluster(Layout(1, 4, 4), 100, max_ahead=1)
    (request,) = decoding(cluster, [1])
    step = cluster.dispatch()
    with pytest.raises(ValueError, match="1 rows failed and 1 further steps are allowed, but the ranks go on"):
        cluster.scheduler.commit(step, {}, {request.handle: "not finite"}, more=True)
    step = cluster.go_on(step)
    with pytest.raises(ValueError, match="0 rows failed and 0 further steps"):
        cluster.commit(step, more=True)
    cluster.commit(step)
