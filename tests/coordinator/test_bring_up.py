"""From registered ranks to a set that serves, and every way it may fail to."""

import asyncio
from dataclasses import replace

import pytest

from coordinator.bring_up import first_difference, pool_blocks
from coordinator.faults import StartFailed
from cp_wire import errors
from cp_wire.pb import coordinator_pb2, rank_pb2
from tests.coordinator.fake_rank import FakeRank
from tests.coordinator.harness import FAST, cluster, cluster_config


async def test_groups_of_the_grid_are_opened_and_reported():
    async with cluster(tp=2, pcp=2, dcp=4) as harness:
        status = await harness.status()
        assert {group.name: list(group.ranks) for group in status.groups} == {
            "tp:0": [0, 1], "tp:1": [2, 3], "q:0": [0, 1], "q:1": [2, 3], "dcp:0": [0, 2, 1, 3],
            "pcp:0": [0, 2], "pcp:1": [1, 3],
        }  # fmt: skip
        assert harness.ranks[2].groups == {"tp:1": [2, 3], "q:1": [2, 3], "dcp:0": [0, 2, 1, 3], "pcp:0": [0, 2]}
        assert status.state == "serving"


async def test_group_of_one_is_not_opened():
    async with cluster() as harness:
        assert harness.ranks[0].commands == ["configure", "allocate_pool"]


async def test_pool_is_the_least_any_rank_can_hold():
    async with cluster(ranks=[FakeRank(0, 50), FakeRank(1, 40)], pcp=2, dcp=2) as harness:
        assert [rank.pool for rank in harness.ranks] == [40, 40]
        status = await harness.status()
        assert status.kv_capacity_tokens == 2 * 40 * 4
        assert [(rank.kv_blocks_total, rank.kv_blocks_free) for rank in status.ranks] == [(40, 40)] * 2
        assert status.config.kv_cache_tokens_per_rank == 160


async def test_j5_configured_pool_size_is_taken_in_whole_blocks_and_said_once(caplog):
    async with cluster(kv_cache_tokens_per_rank=83, pcp=2, dcp=2) as harness:
        assert harness.ranks[0].pool == 20
        answer = await harness.control.GetConfig(coordinator_pb2.GetConfigRequest(), timeout=5)
        assert answer.config.kv_cache_tokens_per_rank == 80
        await harness.ranks[1].die()
        await harness.until(lambda status: status.state == "degraded")
        await harness.replace(1)
        await harness.until(lambda status: status.state == "serving")
    (line,) = [record for record in caplog.records if "whole blocks" in record.getMessage()]
    assert line.levelname == "WARNING"
    assert line.fields == {"asked_tokens": 83, "tokens": 80, "block_size": 4}


async def test_pool_size_of_whole_blocks_is_no_matter_for_the_log(caplog):
    async with cluster(kv_cache_tokens_per_rank=80):
        assert not [record for record in caplog.records if "whole blocks" in record.getMessage()]


def test_pool_size_laws():
    config = cluster_config(kv_cache_tokens_per_rank=44)
    assert pool_blocks(config, {0: 11, 1: 30}) == 11
    with pytest.raises(errors.ConfigRefused, match=r"rank 1: room for 10 KV blocks of 4 tokens, .* 44 needs 11"):
        pool_blocks(config, {0: 30, 1: 10})
    assert pool_blocks(cluster_config(), {0: 30, 1: 10}) == 10
    with pytest.raises(errors.ConfigRefused, match="rank 0: no room"):
        pool_blocks(cluster_config(), {0: 0, 1: 10})


@pytest.mark.parametrize("field", ["interleave", "dtype", "max_model_len", "dcp", "merge"])
def test_h14_first_difference_names_field_and_values(field):
    ours, theirs = cluster_config(), cluster_config()
    assert first_difference(ours, theirs) is None
    setattr(theirs, field, "float16" if field == "dtype" else 2)
    assert first_difference(ours, theirs) == f"{field} is {getattr(ours, field)} here and {getattr(theirs, field)} there"


async def fails(rank: FakeRank, **config: object) -> str:
    async with cluster(ranks=[FakeRank(0), rank], wait=False, pcp=2, dcp=2, **config) as harness:
        with pytest.raises((StartFailed, errors.ConfigRefused)) as caught:
            await harness.coordinator.ready()
        assert (await harness.status()).state == "starting"
    return str(caught.value)


async def test_k9_rank_that_refuses_its_weights_ends_the_start():
    rank = FakeRank(1)
    rank.fail_command = ("configure", rank_pb2.CommandError(reason="MODEL_REFUSED", message="tensor x is missing"))
    assert await fails(rank) == "rank 1: MODEL_REFUSED: tensor x is missing"


@pytest.mark.parametrize("command", ["allocate_pool", "open_group"])
async def test_k9_rank_that_fails_a_later_command_ends_the_start(command):
    rank = FakeRank(1)
    rank.fail_command = (command, rank_pb2.CommandError(reason="OUT_OF_MEMORY", message="no"))
    assert await fails(rank) == "rank 1: OUT_OF_MEMORY: no"


async def test_f7_rank_that_took_over_another_configuration_ends_the_start():
    rank = FakeRank(1)
    rank.echo_change = {"interleave": 1}
    assert "rank 1: took over another configuration: interleave is 4 here and 1 there" in await fails(rank)


@pytest.mark.parametrize("field", ["model_hash", "protocol_version"])
async def test_stranger_is_refused_and_ends_the_start(field):
    rank = FakeRank(1)
    setattr(rank, field, "strange")
    async with cluster(ranks=[FakeRank(0)], wait=False, pcp=2, dcp=2) as harness:
        harness.ranks.append(rank)
        with pytest.raises(errors.ConfigRefused, match=f"rank 1: {field} is strange"):
            await rank.start(harness.address)
        with pytest.raises(errors.ConfigRefused, match=field):
            await harness.coordinator.ready()


@pytest.mark.parametrize("host", ["another-host", ""])
async def test_rank_of_another_host_is_refused_where_memory_is_shared(host):
    rank = FakeRank(1)
    rank.host = host
    async with cluster(ranks=[FakeRank(0)], wait=False, pcp=2, dcp=2, collectives="shm") as harness:
        harness.ranks.append(rank)
        with pytest.raises(errors.ConfigRefused, match="rank 1 shares no memory with rank 0, which collectives shm need"):
            await rank.start(harness.address)
        with pytest.raises(errors.ConfigRefused, match="rank 1"):
            await harness.coordinator.ready()


async def test_rank_that_shares_memory_with_nobody_is_refused_where_memory_is_shared():
    rank = FakeRank(0)
    rank.host = ""
    async with cluster(ranks=[], wait=False, pcp=2, dcp=2, collectives="shm") as harness:
        harness.ranks.append(rank)
        with pytest.raises(errors.ConfigRefused, match="rank 0 shares no memory with any other"):
            await rank.start(harness.address)


async def test_ranks_of_several_hosts_serve_where_no_memory_is_shared():
    ranks = [FakeRank(0), FakeRank(1)]
    ranks[1].host = "another-host"
    async with cluster(ranks=ranks, pcp=2, dcp=2, collectives="gloo") as harness:
        assert (await harness.status()).state == "serving"


async def test_sets_that_share_memory_may_be_on_several_hosts():
    ranks = [FakeRank(0), FakeRank(1)]
    ranks[1].host = "another-host"
    async with cluster(ranks=ranks, dp=2, collectives="shm") as harness:
        assert (await harness.status()).state == "serving"


async def test_stranger_during_service_is_refused_and_harms_nobody():
    async with cluster() as harness:
        rank = FakeRank(0)
        rank.model_hash = "strange"
        with pytest.raises(errors.ConfigRefused):
            await rank.start(harness.address)
        await rank.die()
        beyond = FakeRank(1)
        with pytest.raises(errors.InvalidRequest, match="rank is 1"):
            await beyond.start(harness.address)
        await beyond.die()
        assert (await harness.generate([1])).error is None


async def test_rank_that_dies_while_loading_ends_the_start():
    rank = FakeRank(1)
    rank.gate.clear()
    async with cluster(ranks=[FakeRank(0), rank], wait=False, pcp=2, dcp=2) as harness:
        await rank.die()
        with pytest.raises(StartFailed, match="rank 1: "):
            await harness.coordinator.ready()


async def test_start_deadline_names_who_never_came():
    timings = replace(FAST, start_s=0.3)
    async with cluster(ranks=[FakeRank(0)], wait=False, timings=timings, pcp=2, dcp=2) as harness:
        with pytest.raises(StartFailed, match=r"not ready after 0\.3 s: rank 0 is loading, rank 1 is absent"):
            await harness.coordinator.ready()


async def test_requests_before_the_start_are_told_to_come_back():
    async with cluster(ranks=[FakeRank(0)], wait=False, pcp=2, dcp=2) as harness:
        heard = await harness.generate([1])
        assert isinstance(heard.error, errors.Unavailable) and heard.error.retry_after_s == 1


@pytest.mark.parametrize("command", ["configure", "allocate_pool"])
@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("CONFIG_REFUSED", errors.ConfigRefused),
        ("POOL_REFUSED", errors.ConfigRefused),
        ("MODEL_REFUSED", errors.ConfigRefused),
        ("PLAN_REFUSED", StartFailed),
        ("OUT_OF_MEMORY", StartFailed),
    ],
)
async def test_k9_what_a_rank_refuses_is_a_refusal_of_the_cluster(command, reason, kind):
    rank = FakeRank(0)
    rank.fail_command = (command, rank_pb2.CommandError(reason=reason, message="no"))
    async with cluster(ranks=[rank], wait=False) as harness:
        with pytest.raises(kind, match=reason):
            await harness.coordinator.ready()


async def test_a_restarted_rank_is_told_that_the_pool_is_settled():
    async with cluster(kv_cache_tokens_per_rank=83) as harness:
        first = harness.ranks[0]
        assert not first.pool_is_settled
        await first.die()
        await harness.until(lambda status: status.ranks[0].state == "lost")
        second = FakeRank(0, max_kv_blocks=20)
        harness.ranks.append(second)
        await second.start(harness.address)
        await harness.until(lambda status: status.state == "serving")
        assert second.pool_is_settled
        assert second.pool == 20


async def test_how_far_a_rank_is_with_its_weights_shows_in_the_status():
    rank = FakeRank(0)
    rank.gate.clear()
    rank.load_fraction = 0.5
    async with cluster(ranks=[rank], wait=False) as harness:
        async with asyncio.timeout(5):
            while (seen := (await harness.status()).ranks[0]).load_fraction != 0.5:  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0)
        assert seen.state == "loading"
        rank.gate.set()
        await harness.coordinator.ready()
