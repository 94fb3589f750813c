"""Requests whose KV comes from another set, or is read by another set: what the scheduler keeps for them, and until when."""

import pytest

from coordinator.kv_blocks import KvBlocks
from coordinator.plan import Sampling
from coordinator.request import Request, State
from coordinator.scheduler import Scheduler, SchedulerConfig
from cp_layout.interleave import Layout
from tests.coordinator.oracle import Cluster, run_alone

LAYOUTS = [Layout(1, 4, 4), Layout(2, 4, 4), Layout(2, 1, 4), Layout(4, 4, 4)]
ONE = Layout(1, 4, 4)


def request_of(handle: int, prompt: list[int], max_tokens: int = 4, **fields) -> Request:
    return Request(handle, f"r{handle}", prompt, Sampling(max_tokens=max_tokens), **fields)


def scheduler_of(layout: Layout = ONE, blocks: int = 8, seats: int = 4, budget: int = 64) -> Scheduler:
    return Scheduler(SchedulerConfig(seats, budget, 100), layout, blocks, b"identity")


def run(scheduler: Scheduler, token: int = 7) -> None:
    """One step that draws the same token everywhere."""
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step, {row.handle: token for row in step.rows if row.sample})


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_reservation_holds_the_prompt_and_the_token_after_it_and_no_rank_knows_of_it(layout):
    scheduler = scheduler_of(layout)
    prompt = list(range(2 * layout.virtual_block_size))
    request = request_of(1, prompt)
    assert scheduler.reserve(request) == 0
    needed = [layout.blocks_needed(r, len(prompt) + 1) for r in range(layout.num_shards)]
    assert sum(8 - free for free in scheduler.free_blocks) == sum(needed)
    assert scheduler.table_blocks == (0,) * layout.num_shards
    assert (scheduler.running, scheduler.waiting, scheduler.seated) == (0, 0, 1)
    assert scheduler.schedule() is None
    scheduler.cancel(1)
    assert set(scheduler.free_blocks) == {8} and request.state is State.FINISHED


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_arrived_request_decodes_and_recomputes_nothing(layout):
    scheduler = scheduler_of(layout)
    prompt = list(range(2 * layout.virtual_block_size))
    request = request_of(1, prompt, 3)
    scheduler.reserve(request)
    tables = tuple(scheduler.columns(request, member, range(99)) for member in range(layout.num_shards))
    request.output.append(11)
    scheduler.arrive(1, len(prompt))
    step = scheduler.schedule()
    (admission,), (row,) = step.admitted, step.rows
    assert (admission.num_cached_tokens, admission.shard_offset) == (len(prompt), request.shard_offset)
    assert (row.start, row.token_ids, row.output_index, row.sample) == (len(prompt), (11,), 1, True)
    assert row.new_blocks == tables
    assert scheduler.table_blocks == tuple(map(len, tables))
    (progress,) = scheduler.commit(step, {1: 12})
    assert (progress.new_token, progress.finished) == (12, None)
    run(scheduler, 13)
    assert request.output == [11, 12, 13] and request.finish_reason == "length" and request.num_recomputed == 0
    assert set(scheduler.free_blocks) == {8} and scheduler.schedule().released == (1,)


def test_one_whose_kv_has_come_may_be_taken_in_without_a_free_seat():
    scheduler = scheduler_of(seats=1)
    scheduler.reserve(request_of(1, [1, 2, 3]))
    assert not scheduler.may_grow
    scheduler.arrive(1, 2)
    assert scheduler.may_grow
    run(scheduler)
    assert not scheduler.may_grow


def test_who_finds_no_room_is_reserved_once_the_prompt_that_it_shares_is_there():
    scheduler = scheduler_of(blocks=12)
    first, second = request_of(1, [1] * 24), request_of(2, [1] * 24 + [2] * 4)
    assert scheduler.reserve(first) == 0 and scheduler.reserve(second) is None
    first.output.append(11)
    scheduler.arrive(1, 24)
    assert scheduler.reserve(second) is None
    run(scheduler)
    assert first.state is State.RUNNING and scheduler.reserve(second) == 24


def test_who_finds_no_room_is_not_looked_at_again_with_every_chunk_of_a_prompt(monkeypatch):
    looks = []
    place = KvBlocks.place

    def counted(blocks, request, more=0):
        looks.append(request.handle)
        return place(blocks, request, more)

    monkeypatch.setattr(KvBlocks, "place", counted)
    scheduler = scheduler_of(blocks=12, budget=4)
    first, second = request_of(1, [1] * 24), request_of(2, [2] * 28)
    scheduler.reserve(first)
    scheduler.arrive(1, 4)
    while not first.output:
        assert scheduler.reserve(second) is None
        run(scheduler)
    assert first.num_computed == 24 and scheduler.reserve(second) is None
    assert looks == [1, 2, 2]


@pytest.mark.parametrize("moved", [0, 3, 8, 17])
def test_what_has_not_arrived_is_computed_in_the_reserved_blocks(moved):
    layout = Layout(2, 4, 4)
    cluster = Cluster(layout, 8, max_num_batched_tokens=6)
    request = request_of(1, list(range(20)), 4)
    cluster.requests[1], cluster.tokens[1] = request, []
    assert cluster.scheduler.reserve(request) == 0
    free = cluster.scheduler.free_blocks
    cluster.scheduler.arrive(1, moved)
    starts = []
    while request.num_computed < 20:
        step = cluster.scheduler.schedule()
        starts.append(step.rows[0].start)
        assert cluster.scheduler.free_blocks == free
        cluster.scheduler.commit(step, {row.handle: 3 for row in step.rows if row.sample})
    assert starts == list(range(moved, 20, 6))


def test_f12_a_reservation_starts_behind_what_the_prefix_cache_has():
    layout = Layout(2, 4, 4)
    scheduler = scheduler_of(layout)
    first = request_of(1, list(range(20)), 1)
    scheduler.add(first)
    run(scheduler)
    assert scheduler.reserve(request_of(2, [*range(16), 50, 51, 52])) == 16
    scheduler.cancel(2)
    assert set(scheduler.free_blocks) == {8}


def test_the_moved_prompt_is_cached_with_the_first_decode_step():
    scheduler = scheduler_of()
    request = request_of(1, list(range(12)))
    scheduler.reserve(request)
    request.output.append(5)
    scheduler.arrive(1, 12)
    assert scheduler.reserve(request_of(2, [*range(12), 5])) == 0
    scheduler.cancel(2)
    run(scheduler)
    assert scheduler.reserve(request_of(3, [*range(12), 5])) == 12


def test_nothing_is_reserved_without_room_seats_or_behind_preempted_requests():
    scheduler = scheduler_of(blocks=4, seats=2)
    assert scheduler.reserve(request_of(1, list(range(12)))) == 0
    assert scheduler.reserve(request_of(2, [1])) is None, "the prompt's last block is full, the first output takes one more"
    scheduler.cancel(1)
    assert scheduler.reserve(request_of(3, [1])) == 0
    assert scheduler.reserve(request_of(4, [2])) == 0
    assert scheduler.reserve(request_of(5, [3])) is None, "both seats are taken"
    scheduler.cancel(3)
    scheduler.add(request_of(6, [4]))
    assert scheduler.reserve(request_of(7, [5])) is None, "somebody waits"


def test_a_reservation_that_did_not_fit_is_judged_again_when_something_was_given_back():
    scheduler = scheduler_of(blocks=4)
    scheduler.reserve(request_of(1, list(range(12))))
    big = request_of(2, list(range(8)), 1)
    assert [scheduler.reserve(big) for _ in range(2)] == [None, None]
    scheduler.cancel(1)
    assert scheduler.reserve(big) == 0


def test_g1_a_reservation_that_can_never_fit_is_refused():
    with pytest.raises(ValueError, match="can never run"):
        scheduler_of(blocks=4).reserve(request_of(1, list(range(16)), 2))


def test_a_completion_is_reserved_when_its_leaders_prompt_is_there():
    scheduler = scheduler_of()
    leader = request_of(1, list(range(12)))
    follower = request_of(2, list(range(12)), leader=leader)
    scheduler.reserve(leader)
    assert scheduler.reserve(follower) is None
    leader.output.append(5)
    scheduler.arrive(1, 12)
    run(scheduler)
    assert scheduler.reserve(follower) == 8, "one token is always left to compute"


def test_an_arrived_request_can_be_aborted_a_reserved_one_only_cancelled():
    scheduler = scheduler_of()
    scheduler.reserve(request_of(1, [1]))
    scheduler.abort(1)
    assert scheduler.free_blocks != (8,)
    scheduler.arrive(1, 0)
    scheduler.cancel(1)
    assert scheduler.free_blocks != (8,)
    scheduler.abort(1)
    assert scheduler.free_blocks == (8,) and scheduler.schedule() is None
    scheduler.arrive(1, 0)
    scheduler.cancel(1)


def test_fail_all_ends_reserved_arrived_and_held_requests():
    scheduler = scheduler_of()
    requests = [request_of(handle, [handle], is_leased=handle == 3) for handle in (1, 2, 3)]
    scheduler.add(requests[2])
    run(scheduler)
    scheduler.abort(3)
    for request in requests[:2]:
        scheduler.reserve(request)
    scheduler.arrive(2, 0)
    assert set(scheduler.fail_all("gone")) == {1, 2}
    assert scheduler.free_blocks == (8,) and scheduler.seated == 0
    scheduler.end_lease(3)
    scheduler.cancel(1)
    assert scheduler.free_blocks == (8,)


@pytest.mark.parametrize("how", ["length", "abort", "abort in flight"])
def test_h3_leased_blocks_stay_held_after_their_request(how):
    scheduler = scheduler_of(blocks=4)
    request = request_of(1, list(range(9)), 2 if how == "length" else 5, is_leased=True)
    scheduler.add(request)
    run(scheduler)
    if how == "length":
        run(scheduler)
    elif how == "abort":
        scheduler.abort(1)
    else:
        step = scheduler.schedule()
        scheduler.abort(1)
        scheduler.commit(step, {1: 7})
    assert request.state is State.FINISHED
    step = scheduler.schedule()
    assert step.released == (1,) and scheduler.table_blocks == (0,)
    scheduler.commit(step, {})
    assert scheduler.free_blocks == (1,)
    scheduler.add(request_of(2, [60] * 8, 1))
    assert scheduler.schedule() is None, "no block of a lease is handed out"
    scheduler.end_lease(1)
    scheduler.end_lease(1)
    assert scheduler.free_blocks == (4,)
    run(scheduler)


def test_blocks_under_lease_are_not_taken_away_and_the_older_request_waits_for_them():
    scheduler = scheduler_of(blocks=4)
    old, young = request_of(1, [1] * 4, 9), request_of(2, [2] * 7, 2, is_leased=True)
    scheduler.add(old, young)
    run(scheduler)
    for _ in range(4):
        run(scheduler)
    assert young.finish_reason == "length" and scheduler.free_blocks == (0,)
    while (step := scheduler.schedule()) is not None:
        scheduler.commit(step, {row.handle: 7 for row in step.rows})
    assert old.state is State.WAITING and old.num_preemptions == 1, "it gave way itself"
    scheduler.end_lease(2)
    run(scheduler)
    assert old.state is State.RUNNING


def test_a_leased_request_is_no_victim():
    scheduler = scheduler_of(blocks=4)
    old, young = (request_of(handle, [handle] * (3 + handle), 9, is_leased=True) for handle in (1, 2))
    scheduler.add(old, young)
    run(scheduler)
    while (step := scheduler.schedule()) is not None:
        scheduler.commit(step, {row.handle: 7 for row in step.rows})
    assert (old.state, young.state) == (State.RUNNING, State.RUNNING)
    assert scheduler.stats.preemptions == 0
    scheduler.end_lease(2)
    run(scheduler)
    assert (old.state, young.state) == (State.RUNNING, State.WAITING)


def test_a_lease_that_ends_before_its_request_leaves_nothing_held():
    scheduler = scheduler_of()
    waits, runs = (request_of(handle, [handle], is_leased=True) for handle in (1, 2))
    scheduler.add(runs)
    run(scheduler)
    scheduler.add(waits)
    for request in (waits, runs):
        scheduler.end_lease(request.handle)
        scheduler.abort(request.handle)
    assert scheduler.free_blocks == (8,)


def test_a_prompts_set_preempts_nobody():
    """Requests of one token each get in only if they fit as a whole, so leases are never in anybody's way."""
    cluster = Cluster(Layout(2, 4, 4), 6, max_num_batched_tokens=5)
    requests = [cluster.add([handle] * length, 1) for handle, length in enumerate((17, 30, 3, 40, 8, 25, 1, 33))]
    cluster.drain()
    assert cluster.scheduler.stats.preemptions == 0
    for request in requests:
        assert request.output == run_alone(request.prompt, request.sampling)[0]
