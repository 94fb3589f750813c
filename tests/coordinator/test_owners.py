"""Owners of requests, and what the prefix cache may know of what they decode."""

import pytest

from coordinator.choice import Replicas
from coordinator.plan import DecodeMode, Gather
from cp_layout.interleave import Layout
from tests.coordinator.oracle import Cluster

WAYS = frozenset(DecodeMode)
COPIED = Replicas(pcp=2, dcp=1, ways=WAYS)
CUT = Replicas(pcp=2, dcp=2, ways=WAYS)
ONE, TWO = Layout(1, 4, 4), Layout(2, 4, 4)


def owners(cluster: Cluster) -> dict[int, int]:
    return {admission.handle: admission.owner for step in cluster.steps for admission in step.admitted}


def test_requests_go_to_the_replica_with_the_fewest_and_come_back_anywhere() -> None:
    cluster = Cluster(Layout(3, 4, 4), 40, replicas=Replicas(3, 3, WAYS))
    lengths = (9, 1, 9, 9, 9, 9)
    requests = [cluster.add([i + 1] * 3, n) for i, n in enumerate(lengths)]
    cluster.step()
    assert [request.owner for request in requests] == [0, 1, 2, 0, 1, 2]
    late = [cluster.add([7] * 3, 2), cluster.add([8] * 3, 2)]
    cluster.step()
    assert [request.owner for request in late] == [1, 0]  # request 2 has left replica 1
    cluster.drain()


def test_e2_a_preempted_request_is_admitted_with_all_it_knows() -> None:
    cluster = Cluster(ONE, 6, replicas=COPIED)
    requests = [cluster.add([i + 1] * 5, 12) for i in range(3)]
    cluster.drain()
    again = [admission for step in cluster.steps for admission in step.admitted if admission.num_prefill_tokens > 5]
    assert again, "somebody was preempted"
    for request in requests:
        cluster.check_output(request)


@pytest.mark.parametrize(("layout", "replicas", "hit"), [(ONE, COPIED, 4), (TWO, CUT, 16)], ids=["copied", "cut"])
def test_output_that_lies_with_its_owner_is_no_prefix_of_anybody_else(layout: Layout, replicas: Replicas, hit: int) -> None:
    cluster = Cluster(layout, 60, replicas=replicas)
    pair = [cluster.add([i] * 6, 14) for i in (1, 2)]  # two rows: they are dealt out
    cluster.drain()
    assert any(step.decode_mode is DecodeMode.OWNER and step.gather is Gather.NONE for step in cluster.steps)
    follow = cluster.add([*pair[0].prompt, *pair[0].output], 2)
    cluster.drain()
    assert follow.num_cached_tokens == hit
    cluster.check_output(follow)


def test_a_request_that_is_bound_stays_with_its_owner_when_it_is_left_alone() -> None:
    cluster = Cluster(ONE, 60, replicas=COPIED)
    cluster.add([1] * 6, 3)
    long = cluster.add([2] * 6, 9)
    cluster.drain()
    assert long.is_bound
    modes = [step.decode_mode for step in cluster.steps if step.rows]
    assert modes == [DecodeMode.OWNER] * len(modes)


def test_a_request_that_was_never_dealt_out_is_free() -> None:
    cluster = Cluster(ONE, 60, replicas=COPIED)
    lone = cluster.add([2] * 6, 9)
    cluster.drain()
    assert not lone.is_bound
    assert [step.decode_mode for step in cluster.steps if step.rows] == [DecodeMode.OWNER, *[DecodeMode.SPLIT] * 8]


def test_a_new_epoch_counts_from_nobody() -> None:
    cluster = Cluster(TWO, 60, replicas=CUT)
    cluster.add([1] * 3, 5)
    cluster.step()
    cluster.scheduler.fail_all("a rank was lost")
    cluster.ranks.reset()
    again = cluster.add([1] * 3, 5)
    cluster.step()
    assert again.owner == 0
    cluster.drain()
