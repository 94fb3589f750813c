"""Completions of one prompt, and requests whose draws count tokens: what the scheduler owes them."""

import pytest

from coordinator import step_draft
from coordinator.plan import Sampling
from coordinator.request import Request
from coordinator.scheduler import QueueFull
from cp_layout.interleave import Layout
from tests.coordinator.oracle import Cluster

ONE, TWO = Layout(1, 4, 4), Layout(2, 4, 4)
PROMPT = list(range(20))


def admitted_in(cluster):
    """Handle → step of its first admission."""
    steps = {}
    for index, step in enumerate(cluster.steps):
        for admission in step.admitted:
            steps.setdefault(admission.handle, index)
    return steps


@pytest.mark.parametrize("layout", [ONE, TWO], ids=str)
def test_completions_wait_for_their_leader_and_find_its_prompt(layout):
    cluster = Cluster(layout, 40, max_num_batched_tokens=12)
    leader = cluster.add(PROMPT, 5)
    followers = [cluster.add(PROMPT, 5, leader=leader) for _ in range(3)]
    cluster.drain()
    assert admitted_in(cluster)[leader.handle] == 0
    assert {admitted_in(cluster)[each.handle] for each in followers} == {2}, "two chunks are the prompt"
    assert [each.num_cached_tokens for each in followers] == [16] * 3
    for request in (leader, *followers):
        cluster.check_output(request)


def test_nobody_passes_a_completion_that_waits():
    cluster = Cluster(ONE, 40, max_num_batched_tokens=30)
    leader = cluster.add(PROMPT, 5)
    follower, other = cluster.add(PROMPT, 5, leader=leader), cluster.add([30, 31], 5)
    cluster.drain()
    assert admitted_in(cluster) == {leader.handle: 0, follower.handle: 1, other.handle: 1}


@pytest.mark.parametrize("when", ["waiting", "running", "in flight"])
def test_a_leader_that_ends_early_holds_nobody_up(when):
    cluster = Cluster(ONE, 40, max_num_batched_tokens=4)
    leader = cluster.add(PROMPT, 5)
    followers = [cluster.add(PROMPT, 5, leader=leader) for _ in range(2)]
    if when == "running":
        cluster.step()
    step = cluster.dispatch() if when == "in flight" else None
    cluster.scheduler.abort(leader.handle)
    if step is not None:
        cluster.commit(step)
    cluster.drain()
    for request in followers:
        cluster.check_output(request)


def test_a_preempted_leader_that_has_computed_its_prompt_holds_nobody_up():
    cluster = Cluster(ONE, 8, max_num_batched_tokens=40)
    old = cluster.add([40, 41], 20)
    leader = cluster.add(PROMPT, 8)
    follower = cluster.add(PROMPT, 8, leader=leader)
    cluster.drain()
    assert leader.num_preemptions + follower.num_preemptions > 0
    for request in (old, leader, follower):
        cluster.check_output(request)


def test_all_completions_fit_in_the_queue_or_none_is_taken():
    cluster = Cluster(ONE, 40, max_waiting=3)
    cluster.add([1], 1)
    requests = [Request(handle, "r", PROMPT, Sampling(max_tokens=2)) for handle in (11, 12, 13)]
    with pytest.raises(QueueFull, match="1 requests are waiting and 3 more would make 4, the limit is 3"):
        cluster.scheduler.add(*requests)
    assert cluster.scheduler.waiting == 1
    cluster.drain()


def test_plans_with_many_cached_tokens_admit_one_request_at_a_time(monkeypatch):
    cluster = Cluster(ONE, 60)
    cluster.add(PROMPT, 1)
    cluster.drain()
    monkeypatch.setattr(step_draft, "MAX_CACHED_TOKENS_IN_PLAN", 20)
    requests = [cluster.add(PROMPT, 2, repetition_penalty=1.5) for _ in range(4)]
    plain = cluster.add(PROMPT, 2)
    start = len(cluster.steps)
    cluster.drain()
    admitted = [[admission.handle for admission in step.admitted] for step in cluster.steps[start:]]
    assert admitted[:2] == [[requests[0].handle, requests[1].handle], [requests[2].handle, requests[3].handle]]
    assert admitted[2] == [plain.handle]


def test_only_draws_that_count_tokens_are_told_of_cached_ones():
    cluster = Cluster(TWO, 60)
    cluster.add(PROMPT, 1)
    cluster.drain()
    for sampling in ({"repetition_penalty": 0.9}, {"presence_penalty": 1.0}, {"frequency_penalty": -1.0}, {"min_p": 0.5}):
        cluster.add(PROMPT, 1, **sampling)
    cluster.drain()
    lengths = [len(admission.cached_token_ids) for step in cluster.steps for admission in step.admitted]
    assert lengths == [0, 16, 16, 16, 0]


def test_f13_a_prompt_that_is_scored_is_computed_and_serves_others():
    cluster = Cluster(TWO, 60)
    cluster.add(PROMPT, 1)
    cluster.drain()
    scored = cluster.add(PROMPT, 2, prompt_logprobs=0)
    cluster.drain()
    plain = cluster.add(PROMPT, 2)
    cluster.drain()
    assert (scored.num_cached_tokens, plain.num_cached_tokens) == (0, 16)
    assert cluster.ranks.scored == {scored.handle: len(PROMPT)}


def test_f13_a_prompt_of_one_token_has_nothing_to_score():
    cluster = Cluster(ONE, 10)
    request = cluster.add([5], 2, prompt_logprobs=3)
    cluster.drain()
    cluster.check_output(request)
    assert cluster.ranks.scored == {}


@pytest.mark.parametrize("layout", [ONE, TWO], ids=str)
def test_scores_of_a_step_have_a_bound_and_nobody_is_admitted_beside_a_chunk_that_it_cuts(monkeypatch, layout):
    monkeypatch.setattr(step_draft, "MAX_SCORED_VALUES_IN_STEP", 24)
    cluster = Cluster(layout, 40)
    decoding = cluster.add([40, 41], 12)
    cluster.step()
    scored = [cluster.add(PROMPT, 3, prompt_logprobs=3), cluster.add(PROMPT[:4], 3, prompt_logprobs=0)]
    start = len(cluster.steps)
    cluster.drain()
    rows = [{row.handle: row for row in step.rows} for step in cluster.steps[start:]]
    assert [len(each[scored[0].handle].score_token_ids) for each in rows[:4]] == [6, 6, 6, 1]
    assert all(sum(len(row.score_token_ids) for row in each.values()) <= 6 for each in rows[:3])
    assert [scored[1].handle in each for each in rows[:4]] == [False, False, False, True]
    assert decoding.handle in rows[0]
    for request in (decoding, *scored):
        cluster.check_output(request)
    assert cluster.ranks.scored == {scored[0].handle: len(PROMPT), scored[1].handle: 4}
