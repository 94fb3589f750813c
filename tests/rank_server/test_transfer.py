"""Moves that go wrong, between whole ranks: what is refused, what a failed pull says, that nothing is written afterwards."""

import asyncio
from contextlib import asynccontextmanager
from unittest import mock

import grpc
import pytest

from cp_wire import errors
from cp_wire.pb import rank_pb2
from kv_transfer.service import KvTransferServicer
from rank_server import transfer as module
from rank_server.pool_store import HostStore
from rank_server.sequences import PlanRefused
from rank_server.transfer import Transfers
from tests.inproc import Shape
from tests.kv_transfer.cluster import Clock
from tests.pd import DEADLINE_S, TTL_MS, pair
from tests.rank_server.ranks import Rank

PROMPT = list(range(30, 61))
SHAPE = Shape(block_size=4, interleave=4)


class Gated(KvTransferServicer):
    """Sends one message, then waits to be told."""

    def __init__(self, source):
        super().__init__(source)
        self.sent = 0
        self.waits = asyncio.Event()
        self.go = asyncio.Event()

    async def send(self, frame, context):
        if self.sent:
            self.waits.set()
            await self.go.wait()
        self.sent += 1
        await super().send(frame, context)


@asynccontextmanager
async def leased(tiny, source=SHAPE, target=SHAPE, **options):
    """A request that is prefilled and leased."""
    async with pair(tiny(), source, target, **options) as running:
        moved, handle = await running.begin(PROMPT, room=2)
        await running.lease(moved)
        yield running, moved, handle


@asynccontextmanager
async def halfway(tiny):
    """A pull of which one message has arrived and the rest is held back by the source."""
    async with leased(tiny, servicer=Gated) as (running, moved, _):
        arrived, write, gate = asyncio.Event(), HostStore.write, running.source.servicers[0]

        def told(*args):
            write(*args)
            arrived.set()

        with mock.patch.object(HostStore, "write", told):
            call = running.target.stubs[0].Pull(running.pull_of(moved, 0, 0, len(PROMPT)), timeout=DEADLINE_S)
            await asyncio.wait_for(asyncio.gather(gate.waits.wait(), arrived.wait()), DEADLINE_S)
            yield running, moved, call, gate


async def refusal(call):
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return errors.from_rpc_error(caught.value)


async def stays_as_it_is(running, gate):
    """What the source still sends arrives nowhere."""
    before = running.target.written(0)
    gate.go.set()
    # Whole answers over the same connections come after whatever was on its way.
    for _ in range(3):
        await running.target.command(step=rank_pb2.StepPlan(ticket=1, timeout_ms=1000, decode_mode=1, gather=1))
    assert running.target.written(0) == before
    assert running.target.transfers[0].active == (0, 0)


CALLS = {
    "Lease": rank_pb2.LeaseRequest(session=1, block_ids=[1], tokens=4, target_ranks=[0], ttl_ms=TTL_MS),
    "EndLease": rank_pb2.EndLeaseRequest(session=1),
    "Pull": rank_pb2.PullRequest(session=1, attempt=9, block_ids=[1], end=4, timeout_ms=1000),
    "EndPull": rank_pb2.EndPullRequest(session=1),
}


@pytest.mark.parametrize("name", CALLS)
async def test_h15_calls_of_another_epoch_or_instance_are_refused(tiny, name):
    async with leased(tiny) as (running, _, _):
        for instance, epoch, said in (
            ("source-0", 1, "of epoch 1, rank 0 is at epoch 0"),
            ("former", 0, "for instance 'former'"),
        ):
            request = type(CALLS[name])()
            request.CopyFrom(CALLS[name])
            request.instance, request.epoch = instance, epoch
            error = await refusal(getattr(running.source.stubs[0], name)(request, timeout=DEADLINE_S))
            assert isinstance(error, errors.Stale) and said in error.message
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


async def test_a_session_of_another_epoch_is_not_read(tiny):
    async with leased(tiny) as (running, moved, _):
        (answer,) = await running.pull(moved, source_epoch=7)
        assert (answer.failure.reason, answer.failure.transient) == ("STALE", False)
        assert running.target.written(0) == 0


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


async def test_h3_a_source_that_is_gone_fails_the_pull(tiny):
    async with leased(tiny) as (running, moved, _):
        await running.source.stop_rank(0)
        (answer,) = await running.pull(moved)
        assert (answer.failure.reason, answer.failure.transient, answer.retries) == ("UNAVAILABLE", True, 2)
        assert running.target.written(0) == 0


async def test_h15_a_source_that_has_restarted_is_no_source(tiny):
    async with leased(tiny) as (running, moved, _):
        running.source.instances[0] = "former"
        (answer,) = await running.pull(moved)
        assert (answer.failure.reason, answer.failure.transient) == ("CONFIG_REFUSED", False)
        assert "it has restarted" in answer.failure.message
        assert running.target.written(0) == 0


async def test_h7_a_pull_that_is_cancelled_halfway_writes_nothing_more(tiny):
    async with halfway(tiny) as (running, moved, call, gate):
        call.cancel()
        await asyncio.wait_for(running.end(moved), DEADLINE_S)
        await stays_as_it_is(running, gate)


async def test_h7_a_pull_that_is_ended_halfway_writes_nothing_more(tiny):
    async with halfway(tiny) as (running, moved, call, gate):
        await running.end(moved)
        error = await refusal(call)
        assert isinstance(error, errors.Stale) and "attempt 1 of transfer 1 was stopped" in error.message
        await stays_as_it_is(running, gate)
        late = await refusal(running.target.stubs[0].Pull(running.pull_of(moved, 0, 0, 31), timeout=DEADLINE_S))
        assert isinstance(late, errors.Stale) and "is over on this rank" in late.message


async def test_a_reset_stops_pulls(tiny):
    async with halfway(tiny) as (running, _, call, gate):
        running.target.epoch = 1
        await running.target.command(reset=rank_pb2.Reset())
        assert isinstance(await refusal(call), errors.Stale)
        await stays_as_it_is(running, gate)


async def test_h5_a_newer_attempt_takes_the_older_one_s_place(tiny):
    async with halfway(tiny) as (running, moved, call, gate):
        again = asyncio.create_task(running.pull(moved))
        assert isinstance(await refusal(call), errors.Stale)
        gate.go.set()
        (answer,) = await again
        assert not answer.HasField("failure") and answer.stale == 0
        error = await refusal(running.target.stubs[0].Pull(running.pull_of(moved, 0, 0, 31, attempt=2), timeout=DEADLINE_S))
        assert "attempt 2 of transfer 1 comes after attempt 2" in error.message
        assert running.target.written(0) == running.source.written(0)


async def test_h1_a_lease_that_is_ended_halfway_fails_the_pull(tiny):
    async with halfway(tiny) as (running, moved, call, gate):
        request = rank_pb2.EndLeaseRequest(instance="source-0", session=moved.session)
        assert (await running.source.stubs[0].EndLease(request, timeout=DEADLINE_S)).how == "cancelled"
        gate.go.set()
        answer = await call
        assert (answer.failure.reason, answer.failure.transient) == ("LEASE_ENDED", False)


async def test_a_lease_that_was_ended_before_it_came_is_refused(tiny):
    async with leased(tiny) as (running, moved, _):
        request = rank_pb2.EndLeaseRequest(instance="source-0", session=99)
        assert (await running.source.stubs[0].EndLease(request, timeout=DEADLINE_S)).how == ""
        late = running.lease_of(moved, 0, 31, session=99)
        assert isinstance(await refusal(running.source.stubs[0].Lease(late, timeout=DEADLINE_S)), errors.LeaseEnded)


async def test_a_slow_pull_ends_at_its_bound(tiny):
    async with leased(tiny, servicer=Gated) as (running, moved, _):
        (answer,) = await running.pull(moved, timeout_ms=300)
        assert (answer.failure.reason, answer.failure.transient) == ("DEADLINE_EXCEEDED", True)
        assert "not done after 0.3 s" in answer.failure.message
        running.source.servicers[0].go.set()


async def test_what_a_device_still_computes_comes_before_its_pool_is_read_or_written(tiny):
    with mock.patch.object(HostStore, "fence") as fence:
        async with leased(tiny) as (running, moved, _):
            assert fence.call_count == 1
            await running.pull(moved)
            assert fence.call_count == 2


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


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"block_ids": [1, 64, 3, 4, 5, 6, 7, 8]}, "block_ids"),
        ({"block_ids": [1, 2]}, "block_ids"),
        ({"first_column": 1}, "block_ids"),
        ({"start": 32}, "end"),
        ({"shard_offset": 1}, "shard_offset"),
        ({"timeout_ms": 0}, "timeout_ms"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_pulls_that_make_no_sense(tiny, changes, field):
    async with leased(tiny) as (running, moved, _):
        request = running.pull_of(moved, 0, 0, 31, **{name: value for name, value in changes.items() if name != "start"})
        request.start = changes.get("start", 0)
        error = await refusal(running.target.stubs[0].Pull(request, timeout=DEADLINE_S))
        assert isinstance(error, errors.InvalidRequest) and error.field == field
        assert running.target.written(0) == 0


async def test_a_source_that_is_no_legal_side_is_refused(tiny):
    async with leased(tiny) as (running, moved, _):
        request = running.pull_of(moved, 0, 0, 31)
        request.source.tp = 3
        assert isinstance(await refusal(running.target.stubs[0].Pull(request, timeout=DEADLINE_S)), errors.ConfigRefused)


async def test_a_plan_with_a_block_that_is_not_there_is_refused(tiny):
    async with leased(tiny) as (running, _, _):
        row = rank_pb2.StepRow(handle=1, token_ids=[1], new_block_ids=[64], new_block_counts=[1])
        with pytest.raises(PlanRefused, match="step 5 hands out blocks 64 to 64 of a pool of 64"):
            running.source.transfers[0].stamp(rank_pb2.StepPlan(ticket=5, rows=[row]))


async def test_h9_leases_expire_without_being_asked_for(tiny, monkeypatch):
    clock, told = Clock(), asyncio.Queue()
    monkeypatch.setattr(module, "SWEEP_S", 0.01)
    monkeypatch.setattr(module, "_tell", told.put_nowait)
    async with leased(tiny, clock=clock) as (running, moved, _):
        clock.now += TTL_MS / 1000
        (ended,) = await asyncio.wait_for(told.get(), DEADLINE_S)
        assert (ended.session, ended.how, running.source.transfers[0].active) == (moved.session, "expired", (0, 0))


async def test_a_rank_without_a_pool_says_that_it_is_not_there_yet(files):
    transfers = Transfers(Rank(files).executor, files, "me", "")
    for call in (
        lambda: transfers.lease(CALLS["Lease"]),
        lambda: transfers.pull(CALLS["Pull"]),
        lambda: transfers.end_lease(CALLS["EndLease"]),
    ):
        with pytest.raises(errors.Unavailable, match="not configured yet"):
            await call()
    assert transfers.active == (0, 0)
    await transfers.close()
