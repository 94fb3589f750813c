"""Leases between whole ranks: how they grow, expire and end, and which blocks stay readable."""

import asyncio

from cp_wire import errors
from cp_wire.pb import rank_pb2
from rank_server import transfer as module
from tests.kv_transfer.cluster import Clock
from tests.pd import TTL_MS, pair
from tests.rank_server.transfers import PROMPT, SHAPE, leased, refusal
from tests.wired import DEADLINE_S


async def test_a_lease_grows_by_columns_and_repeating_it_adds_nothing(tiny):
    async with pair(tiny(), SHAPE, SHAPE) as running:
        moved, _ = await running.begin(PROMPT, room=2)
        table = list(moved.source_tables[0])
        for first, stop, tokens in ((0, 3, 12), (3, 6, 24), (2, 5, 20), (0, 6, 24), (5, 8, 31), (8, 8, 0)):
            await running.lease(moved, tokens, first_column=first, block_ids=table[first:stop])
        assert not (await running.pull(moved))[0].HasField("failure")
        assert running.target.written(0) == running.source.written(0)
        for changes, field in (
            ({"first_column": 9}, "first_column"),
            ({"first_column": 1}, "block_ids"),
            ({"block_ids": [64]}, "block_ids"),
            ({"ttl_ms": 0}, "ttl_ms"),
            ({"target_ranks": []}, "target_ranks"),
            ({"session": 77, "first_column": 1}, "first_column"),
        ):
            error = await refusal(running.lease(moved, **changes))
            assert isinstance(error, errors.InvalidRequest) and error.field == field
        assert running.source.transfers[0].active == (1, 0)


async def test_a_reset_ends_leases_and_starts_their_epoch_anew(tiny):
    async with leased(tiny) as (running, moved, _):
        running.source.epoch = 1
        await running.source.command(reset=rank_pb2.Reset())
        assert running.source.transfers[0].active == (0, 0)
        (answer,) = await running.pull(moved)
        assert (answer.failure.reason, answer.failure.transient, answer.payload_bytes) == ("LEASE_ENDED", False, 0)
        assert running.target.written(0) == 0
        error = await refusal(running.source.stubs[0].Lease(running.lease_of(moved, 0, 31, epoch=0), timeout=DEADLINE_S))
        assert isinstance(error, errors.Stale)


async def test_h9_an_expired_lease_fails_the_pull_and_is_told(tiny):
    clock = Clock()
    async with leased(tiny, clock=clock) as (running, moved, _):
        clock.now += TTL_MS / 1000 - 0.1
        await running.lease(moved)
        clock.now += TTL_MS / 1000 - 0.1
        assert running.source.transfers[0].active == (1, 0)
        clock.now += 0.1
        (answer,) = await running.pull(moved)
        assert (answer.failure.reason, answer.failure.transient) == ("LEASE_ENDED", False)
        assert "expired" in answer.failure.message
        error = await refusal(running.source.stubs[0].Lease(running.lease_of(moved, 0, 31), timeout=DEADLINE_S))
        assert isinstance(error, errors.LeaseEnded)
        assert await running.end(moved) == ["expired"]
        assert running.target.written(0) == 0


async def test_h9_leases_expire_without_being_asked_for(tiny, monkeypatch):
    clock, told = Clock(), asyncio.Queue()
    monkeypatch.setattr(module, "SWEEP_S", 0.01)
    monkeypatch.setattr(module, "_tell", told.put_nowait)
    async with leased(tiny, clock=clock) as (running, moved, _):
        clock.now += TTL_MS / 1000
        (ended,) = await asyncio.wait_for(told.get(), DEADLINE_S)
        assert (ended.session, ended.how, running.source.transfers[0].active) == (moved.session, "expired", (0, 0))


async def test_a_lease_that_was_ended_before_it_came_is_refused(tiny):
    async with leased(tiny) as (running, moved, _):
        request = rank_pb2.EndLeaseRequest(instance="source-0", session=99)
        assert (await running.source.stubs[0].EndLease(request, timeout=DEADLINE_S)).how == ""
        late = running.lease_of(moved, 0, 31, session=99)
        assert isinstance(await refusal(running.source.stubs[0].Lease(late, timeout=DEADLINE_S)), errors.LeaseEnded)


async def test_f12_a_prefix_hit_on_leased_blocks_leaves_them_readable(tiny):
    """The second request is admitted with the first one's full blocks, which stay what they are."""
    async with leased(tiny) as (running, moved, _):
        other, _ = await running.begin([*PROMPT, 7, 8], room=1)
        assert other.source_tables[0][:7] == moved.source_tables[0][:7]
        assert not (await running.pull(moved))[0].HasField("failure")


async def test_h1_leased_blocks_that_get_another_owner_are_not_read(tiny):
    async with leased(tiny) as (running, moved, handle):
        await running.drop(handle)
        while not {*moved.source_tables[0]} & {*(await running.begin(list(range(100, 150)), room=1))[0].source_tables[0]}:
            pass
        (answer,) = await running.pull(moved)
        assert (answer.failure.reason, answer.failure.transient) == ("STALE", False)
        assert "handed out again" in answer.failure.message
        assert running.target.written(0) == 0


async def test_h1_what_a_pull_writes_is_not_leased_any_more(tiny):
    """A rank that is both: blocks of a lease are reserved for a pull, which only a fault of the coordinator brings about."""
    async with leased(tiny) as (running, moved, _):
        lease = running.lease_of(moved, 0, 31, instance="target-0", block_ids=moved.target_tables[0], session=50)
        await running.target.stubs[0].Lease(lease, timeout=DEADLINE_S)
        await running.pull(moved, 16, 31)
        error = await refusal(running.target.stubs[0].Lease(lease, timeout=DEADLINE_S))
        assert isinstance(error, errors.Stale) and "handed out again" in error.message


async def test_blocks_before_the_range_are_left_alone(tiny):
    """A prefix that the target had already may be leased there itself."""
    async with leased(tiny) as (running, moved, _):
        lease = running.lease_of(moved, 0, 16, instance="target-0", block_ids=moved.target_tables[0][:4], session=50)
        await running.target.stubs[0].Lease(lease, timeout=DEADLINE_S)
        assert not (await running.pull(moved, 16, 31))[0].HasField("failure")
        await running.target.stubs[0].Lease(lease, timeout=DEADLINE_S)
