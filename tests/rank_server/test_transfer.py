"""Transfers that whole ranks refuse: calls and sources of another time, and what makes no sense."""

import pytest

from cp_wire import errors
from cp_wire.pb import rank_pb2
from rank_server.sequences import PlanRefused
from rank_server.transfer import Transfers
from tests.pd import TTL_MS
from tests.rank_server.ranks import Rank
from tests.rank_server.transfers import leased, refusal
from tests.wired import DEADLINE_S

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


async def test_a_session_of_another_epoch_is_not_read(tiny):
    async with leased(tiny) as (running, moved, _):
        (answer,) = await running.pull(moved, source_epoch=7)
        assert (answer.failure.reason, answer.failure.transient) == ("STALE", False)
        assert running.target.written(0) == 0


async def test_h15_a_source_that_has_restarted_is_no_source(tiny):
    async with leased(tiny) as (running, moved, _):
        running.source.instances[0] = "former"
        (answer,) = await running.pull(moved)
        assert (answer.failure.reason, answer.failure.transient) == ("CONFIG_REFUSED", False)
        assert "it has restarted" in answer.failure.message
        assert running.target.written(0) == 0


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
