"""Links are measured once, within a bound, and shown."""

from dataclasses import replace

import pytest

from coordinator.link_measure import STAGES, has_time
from cp_layout.model_shape import MlaShape
from cp_layout.rates import Exchange
from cp_wire.pb import common_pb2, rank_pb2
from tests.coordinator import harness as harness_of_ranks
from tests.coordinator.fake_rank import FakeRank
from tests.coordinator.harness import cluster


def slow(rank: int, latency_s: float) -> FakeRank:
    fake = FakeRank(rank)
    fake.latency_s = latency_s
    return fake


async def test_the_slowest_member_is_the_link_and_status_shows_it():
    async with cluster(pcp=2, dcp=2) as harness:
        (link,) = (await harness.status()).links
        assert link.group == "dcp:0"
        # Member 1 takes 9/8 of member 0's time.
        assert link.measured_latency_us == pytest.approx(100 * 9 / 8, rel=1e-3)
        assert link.measured_bytes_per_s == pytest.approx(1e9 * 8 / 9, rel=1e-3)
        assert link.latency_us == pytest.approx(link.measured_latency_us)
        assert harness.ranks[0].measured == harness.ranks[1].measured == [payload for payload, _ in STAGES]


async def test_steps_correct_the_link_but_not_what_was_measured():
    async with cluster(pcp=2, dcp=2) as harness:
        await harness.generate(list(range(20)), max_tokens=9)
        (link,) = (await harness.status()).links
        assert link.measured_latency_us == pytest.approx(100 * 9 / 8, rel=1e-3)
        assert link.latency_us != pytest.approx(link.measured_latency_us, rel=1e-3)


async def test_a_group_of_the_pcp_axis_is_measured_where_keys_are_not_cut():
    async with cluster(pcp=2) as harness:
        (link,) = (await harness.status()).links
        assert link.group == "pcp:0"


@pytest.mark.parametrize("shape", [{}, {"dp": 2}])
async def test_one_replica_has_no_link(shape):
    async with cluster(**shape) as harness:
        assert not (await harness.status()).links
        assert all("measure_group" not in rank.commands for rank in harness.ranks)


async def test_every_set_has_its_own():
    async with cluster(pcp=2, dcp=2, dp=2) as harness:
        assert [link.group for link in (await harness.status()).links] == ["dcp:0", "dcp:1"]


async def test_a_link_that_is_too_slow_to_be_measured_is_not():
    async with cluster(ranks=[slow(0, 0.1), slow(1, 0.1)], pcp=2, dcp=2) as harness:
        assert harness.ranks[0].measured == [STAGES[0][0]]
        assert not (await harness.status()).links
        assert (await harness.generate([1, 2, 3])).finished is not None


async def test_a_link_is_measured_once():
    async with cluster(pcp=2, dcp=2) as harness:
        harness.ranks[0].fail_command = ("step", rank_pb2.CommandError(reason="COLLECTIVE_FAILED", message="lost"))
        await harness.generate([1, 2, 3])
        await harness.until(lambda status: status.state == "serving")
        assert await harness.generate([1, 2, 3])
        assert harness.ranks[0].commands.count("open_group") > 1
        assert len(harness.ranks[0].measured) == len(STAGES)


async def test_a_rank_that_cannot_measure_keeps_the_cluster_from_starting():
    fake = FakeRank(1)
    fake.fail_always = ("measure_group", rank_pb2.CommandError(reason="COLLECTIVE_FAILED", message="lost"))
    async with cluster(ranks=[FakeRank(0), fake], wait=False, pcp=2, dcp=2) as harness:
        with pytest.raises(Exception, match="rank 1: COLLECTIVE_FAILED: lost"):
            await harness.coordinator.ready()


def test_there_is_time_for_what_the_last_exchange_promises():
    assert has_time(None, 4096, 17, left_s=1.0)
    assert not has_time(None, 4096, 17, left_s=0.0)
    last = Exchange(1000, 0.01)
    assert has_time(last, 2000, 10, left_s=0.21)
    assert not has_time(last, 2000, 10, left_s=0.19)


async def test_prefills_are_dealt_out_with_a_gather_that_was_chosen():
    async with cluster(pcp=2, dcp=2) as harness:
        await harness.generate(list(range(20)), max_tokens=4)
        prefill = next(step for step in harness.ranks[0].steps if step.rows)
        assert prefill.decode_mode == common_pb2.DECODE_MODE_OWNER
        assert prefill.gather in (common_pb2.GATHER_Q, common_pb2.GATHER_KV)
        assert prefill.cost_version >= 1
        counts = {(c.decode_mode, c.gather): c.steps for c in (await harness.status()).step_counts}
        assert counts[prefill.decode_mode, prefill.gather] >= 1


@pytest.mark.parametrize(("flag", "gather"), [("q", common_pb2.GATHER_Q), ("kv", common_pb2.GATHER_KV)])
async def test_a_forced_gather_reaches_the_plan(flag, gather):
    async with cluster(pcp=2, dcp=2, pcp_gather=flag) as harness:
        await harness.generate(list(range(20)), max_tokens=2)
        prefills = [step for step in harness.ranks[0].steps if step.rows and step.gather != common_pb2.GATHER_NONE]
        assert {(step.gather, step.cost_version) for step in prefills} == {(gather, 0)}


@pytest.mark.parametrize(
    ("flag", "gathers"), [("q", {common_pb2.GATHER_NONE, common_pb2.GATHER_Q}), ("kv", {common_pb2.GATHER_KV_ALL})]
)
async def test_a_gather_forced_for_latents_reaches_the_plans_of_decode_rows(monkeypatch, flag, gathers):
    latent = replace(harness_of_ranks.SHAPE, mla=MlaShape(None, 8, 4, 4, 4))
    monkeypatch.setattr(harness_of_ranks, "SHAPE", latent)
    async with cluster(pcp=2, dcp=2, mla_gather=flag) as harness:
        await harness.generate(list(range(20)), max_tokens=3)
        assert {step.gather for step in harness.ranks[0].steps if step.rows} == gathers
