"""Prompts on one side, outputs on another: tokens are those of one set, prefixes and moved KV are not computed again."""

import asyncio

import pytest

from tests.coordinator.fake_kv import BYTES_PER_TOKEN
from tests.coordinator.fake_rank import EOS, FakeRank, continuation
from tests.coordinator.handover import ONE, PROMPT, rows_of
from tests.coordinator.harness import cluster, eventually, listen

SHAPES = {
    "1 to 1": ({}, {}),
    "2 to 1, runs of one token": ({"pcp": 2, "dcp": 2, "interleave": 1}, {}),
    "1 to 2": ({}, {"pcp": 2, "dcp": 2}),
    "other blocks": ({"block_size": 2, "interleave": 2}, {"block_size": 8, "interleave": 8}),
    "4 to 2": ({"tp": 2, "pcp": 2, "dcp": 4, "interleave": 2}, {"tp": 2, "dcp": 2, "interleave": 4}),
    "copies": ({"pcp": 2, "dcp": 1}, {"tp": 2, "dcp": 1}),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_tokens_are_those_of_one_set_and_decode_recomputes_none(shape):
    prefill, decode = SHAPES[shape]
    async with cluster(prefill=ONE | prefill, **decode) as harness:
        for number, length in enumerate((1, 3, 8, 16, 17, 39), start=1):
            prompt = [number, *PROMPT[1:length]]
            heard = await harness.generate(prompt, max_tokens=6)
            assert heard.token_ids == continuation(prompt, 6)
            assert (heard.finished.finish_reason, heard.finished.prompt_tokens) == ("length", length)
            for rank in harness.coordinator.sets[1].seats:
                rows = rows_of(harness.ranks[rank], number)
                assert [(row.start, len(row.token_ids)) for row in rows] == [(length + i, 1) for i in range(5)]
            await harness.until_idle()
        status = await harness.status()
        assert status.transfers.requests == 6
        assert not status.transfers.recomputed and not status.transfers.failed
        ranks_per_token = 2 if shape == "copies" else 1
        assert status.transfers.payload_bytes == BYTES_PER_TOKEN * ranks_per_token * sum((1, 3, 8, 16, 17, 39))


async def test_status_and_route_name_the_sides():
    async with cluster(prefill={"pcp": 2, "dcp": 2, "interleave": 1}) as harness:
        status = await harness.status()
        assert [(rank.rank, rank.role) for rank in status.ranks] == [(0, "prefill"), (1, "prefill"), (2, "decode")]
        assert [(side.role, side.config.pcp, side.config.interleave) for side in status.sides] == [
            ("prefill", 2, 1),
            ("decode", 1, 4),
        ]
        assert {group.name: list(group.ranks) for group in status.groups} == {"prefill.dcp:0": [0, 1]}
        assert status.kv_capacity_tokens == 64 * 4
        assert [rank.index for rank in harness.ranks] == [0, 1, 0]
        heard = await harness.generate(PROMPT)
        route = heard.finished.route
        assert (list(route.prefill_group), list(route.decode_group), list(route.ranks)) == ([0, 1], [2], [0, 1, 2])
        assert (route.cp, route.reason) == (1, "prefill and decode apart")
        assert all(rank.config.pcp == 2 for rank in harness.ranks[:2]) and harness.ranks[2].config.pcp == 1


async def test_a_cluster_of_one_side_says_nothing_of_transfers():
    async with cluster() as harness:
        await harness.generate(PROMPT)
        status = await harness.status()
        assert not status.HasField("transfers")
        assert [side.role for side in status.sides] == ["mixed"]


async def test_finished_chunks_move_while_later_ones_compute():
    """A budget of 16 tokens: the first chunk is asked for before the second step is over."""
    async with cluster(prefill={}) as harness:
        source, target = harness.ranks
        pulled = asyncio.create_task(target.kv.hold())
        call = asyncio.create_task(harness.generate(PROMPT, max_tokens=3))
        await pulled
        assert [(pull.start, pull.end) for pull in target.kv.pulls] == [(0, 16)]
        await eventually(lambda: len(source.steps) >= 3)
        target.kv.gate.set()
        assert (await call).token_ids == continuation(PROMPT, 3)
        assert [(pull.start, pull.end) for pull in target.kv.pulls] == [(0, 16), (16, 39)], "ranges in between are merged"


async def test_the_first_token_is_there_before_its_kv_has_moved():
    async with cluster(prefill={}) as harness:
        target = harness.ranks[1]
        target.kv.gate.clear()
        call = harness.call(PROMPT, max_tokens=3)
        tokens = []
        async for event in call:
            tokens += event.tokens.token_ids
            if tokens:
                break
        assert tokens == continuation(PROMPT, 1)
        assert not target.steps
        target.kv.gate.set()
        rest = await listen(call)
        assert tokens + rest.token_ids == continuation(PROMPT, 3)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"stop_token_ids": [continuation(PROMPT[:5], 1)[0]]},
        {"stop": [chr(ord("a") + continuation(PROMPT[:5], 1)[0] % 26)]},
    ],
    ids=["length", "token", "string"],
)
async def test_a_request_that_ends_with_its_first_token_keeps_nothing(fields):
    async with cluster(prefill={}) as harness:
        heard = await harness.generate(PROMPT[:5], **fields)
        assert heard.finished.finish_reason == ("length" if "max_tokens" in fields else "stop")
        assert heard.token_ids == continuation(PROMPT[:5], 1)
        await harness.until_idle()
        assert (await harness.status()).transfers.requests == 0
        if "stop" not in fields:
            assert not harness.ranks[1].kv.pulls


async def test_an_end_that_is_no_end_for_the_prompts_side():
    """min_tokens reaches over the border: the first token may not be a stop token."""
    async with cluster(prefill={}) as harness:
        heard = await harness.generate(PROMPT[:5], ignore_eos=False, min_tokens=2, max_tokens=4)
        assert EOS not in heard.token_ids and heard.token_ids == continuation(PROMPT[:5], 4)
        assert rows_of(harness.ranks[0])[0].ban_stop and rows_of(harness.ranks[1])[0].ban_stop
        assert not rows_of(harness.ranks[1])[1].ban_stop


async def test_f12_prefixes_are_hit_on_either_side():
    async with cluster(prefill={"pcp": 2, "dcp": 2}) as harness:
        target = harness.ranks[2]
        first = await harness.generate(PROMPT, max_tokens=2)
        await harness.until_idle()
        again = await harness.generate([*PROMPT, 50, 51], max_tokens=2)
        assert again.token_ids == continuation([*PROMPT, 50, 51], 2)
        assert (first.finished.cached_tokens, again.finished.cached_tokens) == (0, 32), "whole virtual blocks of 8"
        assert [(pull.start, pull.end) for pull in target.kv.pulls][-1] == (36, 41), "whole blocks of 4 were there already"
        await harness.until_idle()


@pytest.mark.parametrize("count", [2, 5])
async def test_completions_share_the_moved_prompt(count):
    async with cluster(prefill={}, max_num_seqs=8) as harness:
        heard = await harness.generate(PROMPT, n=count, max_tokens=4)
        tokens = {index: [] for index in range(count)}
        for event in heard.events:
            if event.WhichOneof("event") == "tokens":
                tokens[event.tokens.index] += event.tokens.token_ids
        assert list(tokens.values()) == [continuation(PROMPT, 4)] * count
        starts = [pull.start for pull in harness.ranks[1].kv.pulls]
        assert starts.count(36) == count - 1, "the others find all whole blocks of the first"
        await harness.until_idle()


async def test_many_at_once_are_all_right_and_nothing_is_left():
    async with cluster(prefill={"pcp": 2, "dcp": 2, "interleave": 1}, max_num_seqs=3) as harness:
        prompts = [[number, *range(number, number + 3 * number)] for number in range(1, 16)]
        heard = await asyncio.gather(*(harness.generate(prompt, max_tokens=9) for prompt in prompts))
        assert [each.token_ids for each in heard] == [continuation(prompt, 9) for prompt in prompts]
        await harness.until_idle()
        assert (await harness.status()).transfers.requests == 15


async def test_several_sets_on_either_side_share_the_work():
    async with cluster(ranks=[FakeRank(rank) for rank in range(4)], prefill={"dp": 2}, dp=2) as harness:
        prompts = [[number] * 20 for number in range(1, 9)]
        heard = await asyncio.gather(*(harness.generate(prompt) for prompt in prompts))
        assert [each.token_ids for each in heard] == [continuation(prompt, 8) for prompt in prompts]
        assert {tuple(each.finished.route.decode_group) for each in heard} == {(2,), (3,)}
        assert {tuple(each.finished.route.prefill_group) for each in heard} == {(0,), (1,)}
        await harness.until_idle()


async def test_preempted_on_the_decode_side_they_are_computed_there_again():
    target = FakeRank(1, max_kv_blocks=12)
    async with cluster(ranks=[FakeRank(0), target], prefill={}) as harness:
        prompts = [[number] * 8 for number in (1, 2, 3)]
        heard = await asyncio.gather(*(harness.generate(prompt, max_tokens=24) for prompt in prompts))
        assert [each.token_ids for each in heard] == [continuation(prompt, 24) for prompt in prompts]
        status = await harness.status()
        assert status.prefix_cache.preemptions > 0
        assert not status.transfers.recomputed, "that is for moves that failed"
        await harness.until_idle()


async def test_a_drained_coordinator_lets_moving_requests_finish():
    async with cluster(prefill={}) as harness:
        harness.ranks[1].kv.gate.clear()
        call = asyncio.create_task(harness.generate(PROMPT))
        await eventually(lambda: harness.ranks[1].kv.writing)
        draining = asyncio.create_task(harness.coordinator.drain(5))
        harness.ranks[1].kv.gate.set()
        assert (await call).token_ids == continuation(PROMPT, 8)
        assert await draining == 0
