"""What two sides let in, what they refuse, and what is computed on one side alone."""

import asyncio

from grpc_health.v1.health_pb2 import HealthCheckResponse

from coordinator.app import Coordinator, Options
from cp_wire import errors
from tests.coordinator.fake_rank import FakeRank, continuation
from tests.coordinator.handover import FAIL, PROMPT, causes
from tests.coordinator.harness import cluster, eventually


async def test_nothing_is_admitted_before_both_sides_have_served_once():
    async with cluster(ranks=[], prefill={}, wait=False) as harness:
        harness.ranks += [FakeRank(0), FakeRank(1)]
        await harness.ranks[1].start(harness.address)
        await harness.until(lambda status: status.ranks[1].state == "ready")
        assert await harness.health() == HealthCheckResponse.NOT_SERVING
        refused = await harness.generate(PROMPT)
        assert refused.error is not None and "some of the ranks have not served yet" in refused.error.message
        await harness.ranks[0].start(harness.address)
        await harness.until(lambda status: status.state == "serving")
        assert await harness.health() == HealthCheckResponse.SERVING
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        assert not (await harness.status()).transfers.recomputed


async def test_h7_a_prompt_beyond_either_pool_is_refused_before_anything_is_held():
    async with cluster(ranks=[FakeRank(0, 8), FakeRank(1, 20)], prefill={}) as harness:
        for prompt, fields in (([1] * 40, {}), ([1] * 20, {"max_tokens": 90})):
            heard = await harness.generate(prompt, **fields)
            assert isinstance(heard.error, errors.InvalidRequest)
        assert not harness.ranks[0].steps
        await harness.until_idle()


async def test_a_full_queue_refuses():
    async with cluster(prefill={}, max_num_seqs=1, options=Options(max_waiting=1)) as harness:
        harness.ranks[1].kv.gate.clear()
        first = asyncio.create_task(harness.generate(PROMPT))
        await eventually(lambda: harness.ranks[1].kv.pulls)
        second = asyncio.create_task(harness.generate(PROMPT))
        await eventually(lambda: harness.coordinator.handover.waiting == 1)
        status = await harness.status()
        assert (status.running, status.waiting) == (1, 1)
        assert isinstance((await harness.generate(PROMPT)).error, errors.Exhausted)
        harness.ranks[1].kv.gate.set()
        for call in (first, second):
            assert (await call).token_ids == continuation(PROMPT, 8)
        await harness.until_idle()


async def test_a_prompt_too_large_for_the_prompts_side_is_computed_where_its_output_is(monkeypatch):
    """As when it was accepted before that side had a pool."""
    monkeypatch.setattr(Coordinator, "_max_prompt", property(lambda coordinator: None))
    async with cluster(ranks=[FakeRank(0, 8), FakeRank(1, 40)], prefill={}) as harness:
        first, big = await asyncio.gather(harness.generate(PROMPT[:9]), harness.generate([1] * 60))
        assert first.token_ids == continuation(PROMPT[:9], 8)
        assert big.token_ids == continuation([1] * 60, 8)
        assert causes((await harness.status()).transfers.recomputed) == {"PREFILL_TOO_SMALL": 1}
        await harness.until_idle()


async def test_without_prefill_ranks_prompts_are_computed_where_outputs_are():
    async with cluster(prefill={}) as harness:
        await harness.ranks[0].die()
        await harness.until(lambda status: status.state == "degraded")
        heard = await harness.generate(PROMPT)
        assert heard.token_ids == continuation(PROMPT, 8)
        assert list(heard.finished.route.prefill_group) == [1]
        assert causes((await harness.status()).transfers.recomputed) == {"NO_PREFILL_RANKS": 1}
        again = await harness.generate([*PROMPT, 50, 51])
        assert again.token_ids == continuation([*PROMPT, 50, 51], 8)
        assert (heard.finished.cached_tokens, again.finished.cached_tokens) == (0, 36), "whole blocks of 4"


async def test_without_prefill_ranks_the_policy_fail_refuses():
    async with cluster(prefill={}, options=FAIL) as harness:
        await harness.ranks[0].die()
        await harness.until(lambda status: status.state == "degraded")
        heard = await harness.generate(PROMPT)
        assert heard.error.message == "the request's KV could not be moved: NO_PREFILL_RANKS"
