"""Prompts on one side, outputs on another: fake ranks move what they are told to, and everything gets in the way."""

import asyncio
from dataclasses import replace
from time import perf_counter

import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from coordinator import text_worker
from coordinator.app import Coordinator, Options
from coordinator.passage import Phase
from coordinator.text_rows import to_text
from cp_wire import errors
from cp_wire.pb import rank_pb2
from tests.coordinator.fake_kv import BYTES_PER_TOKEN
from tests.coordinator.fake_rank import EOS, FakeRank, continuation
from tests.coordinator.harness import FAST, Heard, cluster, eventually, listen
from tests.coordinator.test_text_delivery import blocked

ONE = {"tp": 1, "pcp": 1, "dcp": 1}
FAIL = Options(recompute_lost_kv=False)
PROMPT = [*range(1, 40)]


def causes(counts) -> dict[str, int]:
    return {each.cause: each.requests for each in counts}


def rows_of(rank: FakeRank, handle: int = 1) -> list[rank_pb2.StepRow]:
    return [row for step in rank.steps for row in step.rows if row.handle == handle]


def scores(heard: Heard) -> list[tuple[int, float]]:
    """Position and score of every prompt token, as they came."""
    return [
        (event.prompt_logprobs.start + offset, position.sampled)
        for event in heard.events
        if event.WhichOneof("event") == "prompt_logprobs"
        for offset, position in enumerate(event.prompt_logprobs.positions)
    ]


def expected_scores(prompt) -> list[tuple[int, float]]:
    return [(position, -float(token) if position else 0.0) for position, token in enumerate(prompt)]


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
        heads = 2 if shape == "copies" else 1
        ranks_per_token = {"4 to 2": 1}.get(shape, heads)
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


async def test_prompt_scores_come_from_the_side_of_the_prompt():
    async with cluster(prefill={}) as harness:
        heard = await harness.generate(PROMPT, prompt_logprobs=0, max_tokens=3)
        assert scores(heard) == expected_scores(PROMPT)
        assert heard.token_ids == continuation(PROMPT, 3)


@pytest.mark.parametrize("late", ["end_pull", "end_lease"])
async def test_prompt_scores_come_once_when_a_move_fails_while_the_prompt_is_computed(late):
    """The step in flight at the failure ends while the move is being stopped, or while the output's set computes already."""
    prompt = [1 + number % 90 for number in range(100)]
    async with cluster(prefill={}, max_num_batched_tokens=8) as harness:
        source, target = harness.ranks
        end = source.kv.end_lease if late == "end_lease" else target.kv.end_pull
        asked, go = asyncio.Event(), asyncio.Event()

        async def delayed(request):
            asked.set()
            await go.wait()
            return await end(request)

        pulled = asyncio.create_task(target.kv.hold())
        call = asyncio.create_task(harness.generate(prompt, prompt_logprobs=0, max_tokens=3))
        await pulled
        await source.hold()
        assert len(source.steps) < 12, "the prompt is not through"
        setattr(source.kv if late == "end_lease" else target.kv, late, delayed)
        target.kv.failures = [FINAL]
        target.kv.gate.set()
        await asyncio.wait_for(asked.wait(), 5)
        if late == "end_lease":
            await target.hold()
        source.gate.set()
        committed = harness.coordinator.sets[0].serving.scheduler
        await eventually(lambda: not committed.running)
        go.set()
        target.gate.set()
        heard = await call
        assert heard.token_ids == continuation(prompt, 3)
        assert scores(heard) == expected_scores(prompt)
        await harness.until_idle()


async def test_many_at_once_are_all_right_and_nothing_is_left():
    async with cluster(prefill={"pcp": 2, "dcp": 2, "interleave": 1}, max_num_seqs=3) as harness:
        prompts = [[number, *range(number, number + 3 * number)] for number in range(1, 16)]
        heard = await asyncio.gather(*(harness.generate(prompt, max_tokens=9) for prompt in prompts))
        assert [each.token_ids for each in heard] == [continuation(prompt, 9) for prompt in prompts]
        await harness.until_idle()
        assert (await harness.status()).transfers.requests == 15


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


@pytest.mark.parametrize("where", ["reserve", "end", "pick_source"])
async def test_a_fault_at_the_hand_over_ends_one_request_alone(where, monkeypatch):
    async with cluster(prefill={}, max_num_seqs=1) as harness:
        target = harness.ranks[1]
        target.kv.gate.clear()
        first = asyncio.create_task(harness.generate(PROMPT))
        await eventually(lambda: target.kv.writing)
        others = []
        for count in (1, 2):
            others.append(asyncio.create_task(harness.generate([5] * 9)))
            await eventually(lambda count=count: harness.coordinator.handover.waiting == count)
        owner = harness.home.serving.scheduler if where == "reserve" else harness.coordinator.handover
        honest, second = getattr(owner, where), min(harness.coordinator.handover._queues[harness.home])

        def fault(*args):
            if where == "pick_source" or args[-1].handle == second:
                monkeypatch.setattr(owner, where, honest)
                raise RuntimeError("broken books")
            return honest(*args)

        monkeypatch.setattr(owner, where, fault)
        target.kv.gate.set()
        assert (await first).token_ids == continuation(PROMPT, 8)
        assert (await others[0]).error.message == "the request could not be handed over (RuntimeError)"
        assert (await others[1]).token_ids == continuation([5] * 9, 8)
        await harness.until_idle()


TRANSIENT = rank_pb2.PullFailure(reason="CORRUPTED", message="damaged", transient=True)
FINAL = rank_pb2.PullFailure(reason="LEASE_ENDED", message="expired", transient=False)


async def test_h8_a_failed_range_is_tried_again_after_longer_and_longer_pauses():
    """The last of the three attempts succeeds."""
    async with cluster(prefill={}, timings=replace(FAST, move_again_s=0.2)) as harness:
        harness.ranks[1].kv.failures = [TRANSIENT, TRANSIENT]
        began = perf_counter()
        heard = await harness.generate([1] * 9)
        assert perf_counter() - began > 0.2 + 0.4
        assert heard.token_ids == continuation([1] * 9, 8)
        assert not (await harness.status()).transfers.recomputed
        assert [(pull.start, pull.end) for pull in harness.ranks[1].kv.pulls] == [(0, 9)] * 3
        await harness.until_idle()


@pytest.mark.parametrize("layout", [{"interleave": 1}, {}], ids=["I = 1", "I = B"])
async def test_a_block_is_named_once_on_either_side_however_many_ranges_a_prompt_has(layout):
    side = {"pcp": 2, "dcp": 2, **layout}
    async with cluster(prefill=side, **side) as harness:
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await harness.until_idle()
        for rank in harness.ranks[:2]:
            named = [block for request in rank.kv.lease_requests for block in request.block_ids]
            assert len(named) == len(set(named)) > 0
        for rank in harness.ranks[2:]:
            assert len(rank.kv.pulls) > 1
            for request in rank.kv.pulls:
                mine = rank.kv.layout.columns(rank.kv.shard_of(request), request.start, request.end)
                assert (request.first_column, len(request.block_ids)) == (mine.start, len(mine))


async def test_of_several_moves_at_once_one_fails():
    async with cluster(prefill={}) as harness:
        target = harness.ranks[1]
        target.kv.gate.clear()
        calls = [asyncio.create_task(harness.generate([number] * 9)) for number in (1, 2, 3)]
        await eventually(lambda: len(target.kv.writing) == 3)
        target.kv.failures = [FINAL]
        target.kv.gate.set()
        assert [(await call).token_ids for call in calls] == [continuation([number] * 9, 8) for number in (1, 2, 3)]
        transfers = (await harness.status()).transfers
        assert (transfers.requests, causes(transfers.recomputed)) == (2, {"LEASE_ENDED": 1})
        assert [row.start for number in (1, 2, 3) for row in rows_of(target, number)[:1]].count(0) == 1
        await harness.until_idle()


@pytest.mark.parametrize("failures", [[TRANSIENT] * 3, [FINAL]], ids=["three times", "for good"])
async def test_h20_a_lost_range_is_recomputed_and_counted(failures, caplog):
    async with cluster(prefill={}) as harness:
        harness.ranks[1].kv.failures = list(failures)
        heard = await harness.generate(PROMPT)
        assert heard.token_ids == continuation(PROMPT, 8)
        assert heard.finished.route.reason == f"recomputed after {failures[0].reason}"
        status = await harness.status()
        assert causes(status.transfers.recomputed) == {failures[0].reason: 1} and status.transfers.requests == 0
        await harness.until_idle()
        (line, *_) = [record for record in caplog.records if "did not come over" in record.getMessage()]
        assert {"session", "tokens", "attempt", "cause", "why"} <= line.fields.keys()


async def test_h20_the_policy_fail_ends_the_request_with_the_cause():
    async with cluster(prefill={}, options=FAIL) as harness:
        harness.ranks[1].kv.failures = [FINAL]
        heard = await harness.generate(PROMPT)
        assert isinstance(heard.error, errors.Unavailable) and heard.error.retryable
        assert heard.error.message == "the request's KV could not be moved: LEASE_ENDED"
        assert causes((await harness.status()).transfers.failed) == {"LEASE_ENDED": 1}
        await harness.until_idle()
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)


async def test_what_has_moved_is_not_recomputed():
    async with cluster(prefill={}) as harness:
        target = harness.ranks[1]
        pulled = asyncio.create_task(target.kv.hold())
        call = asyncio.create_task(harness.generate(PROMPT))
        await pulled
        first = len(target.kv.pulls)
        target.kv.gate.set()
        await eventually(lambda: len(target.kv.pulls) > first)
        target.kv.failures = [FINAL]
        assert (await call).token_ids == continuation(PROMPT, 8)
        assert rows_of(target)[0].start == 16
        await harness.until_idle()


async def test_a_refused_lease_is_a_failed_move():
    async with cluster(prefill={}) as harness:
        harness.ranks[0].kv.refuse_lease = errors.InvalidRequest("block_ids", 7, "no")
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        assert causes((await harness.status()).transfers.recomputed) == {"INVALID_REQUEST": 1}
        await harness.until_idle()


@pytest.mark.parametrize("policy", [Options(), FAIL], ids=["recompute", "fail"])
async def test_h10_a_pull_that_never_answers_has_a_deadline(policy):
    timings = replace(FAST, pull_s=0.1, beside_s=0.1)
    async with cluster(prefill={}, timings=timings, options=policy) as harness:
        harness.ranks[1].kv.gate.clear()
        heard = await harness.generate(PROMPT)
        if policy is FAIL:
            assert heard.error.message == "the request's KV could not be moved: DEADLINE_EXCEEDED"
        else:
            assert heard.token_ids == continuation(PROMPT, 8)
        await harness.until_idle()


async def test_leases_are_prolonged_while_a_chunk_computes():
    timings = replace(FAST, lease_s=0.15)
    async with cluster(prefill={}, timings=timings) as harness:
        source = harness.ranks[0]
        renewed: list[int] = []
        lease = source.kv.lease

        async def count(request):
            source.gate.clear()
            renewed.append(request.tokens)
            return await lease(request)

        source.kv.lease = count
        call = asyncio.create_task(harness.generate([1] * 100))
        await eventually(lambda: len(renewed) > 3)
        assert len(source.steps) < 7, "the prompt is not through"
        source.kv.lease = lease
        source.gate.set()
        assert (await call).token_ids == continuation([1] * 100, 8)
        await harness.until_idle()


@pytest.mark.parametrize("moment", ["queued", "prefill", "moving", "first token", "decode"])
async def test_h4_h6_a_client_that_leaves_in_any_state_leaves_nothing(moment):
    async with cluster(prefill={"pcp": 2, "dcp": 2}, max_num_seqs=1) as harness:
        source, target = harness.ranks[0], harness.ranks[2]
        stays = None
        if moment == "queued":
            target.kv.gate.clear()
            stays = asyncio.create_task(harness.generate([9] * 9))
            await eventually(lambda: target.kv.pulls)
        holding = None
        if moment == "prefill":
            holding = asyncio.create_task(source.hold())
        elif moment in ("moving", "first token"):
            target.kv.gate.clear()
        call = harness.call(PROMPT, max_tokens=80)
        task = asyncio.create_task(listen(call))
        if holding is not None:
            await holding
        await eventually(
            {
                "queued": lambda: harness.coordinator.handover.waiting == 1,
                "prefill": lambda: True,
                "moving": lambda: target.kv.writing,
                "first token": lambda: len(source.steps) >= 3 and target.kv.writing,
                "decode": lambda: len(target.steps) > 2,
            }[moment]
        )
        call.cancel()
        await asyncio.gather(task, return_exceptions=True)
        source.gate.set()
        if stays is None:
            await harness.until_idle()
        target.kv.gate.set()
        if stays is not None:
            assert (await stays).token_ids == continuation([9] * 9, 8)
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await harness.until_idle()


async def replaced(harness, rank: int) -> None:
    await harness.ranks[rank].die()
    await harness.until(lambda status: status.state == "degraded")
    await harness.replace(rank)
    await harness.until(lambda status: status.state == "serving")


@pytest.mark.parametrize("policy", [Options(), FAIL], ids=["recompute", "fail"])
@pytest.mark.parametrize("moment", ["prefill", "moving"])
async def test_h19_a_lost_prefill_rank(moment, policy):
    async with cluster(prefill={"pcp": 2, "dcp": 2}, options=policy) as harness:
        source, target = harness.ranks[0], harness.ranks[2]
        if moment == "prefill":
            holding = asyncio.create_task(source.hold())
            call = asyncio.create_task(harness.generate(PROMPT))
            await holding
        else:
            target.kv.gate.clear()
            call = asyncio.create_task(harness.generate(PROMPT))
            await eventually(lambda: target.kv.writing and len(source.steps) >= 3)
        await harness.ranks[1].die()
        heard = await call
        source.gate.set()
        target.kv.gate.set()
        status = await harness.status()
        if policy is FAIL:
            assert isinstance(heard.error, errors.Unavailable) and heard.error.retryable
            assert "rank 1" in heard.error.message or "UNAVAILABLE" in heard.error.message
            assert sum(causes(status.transfers.failed).values()) == 1
        else:
            assert heard.token_ids == continuation(PROMPT, 8)
            assert sum(causes(status.transfers.recomputed).values()) == 1
        await harness.replace(1)
        await harness.until(lambda status: status.state == "serving")
        again = await harness.generate(PROMPT)
        assert again.token_ids == continuation(PROMPT, 8) and again.finished.route.reason == "prefill and decode apart"
        await harness.until_idle()


async def test_a_prefill_rank_that_is_lost_between_moves_leaves_no_session_on_the_writers():
    async with cluster(prefill={}) as harness:
        source, target = harness.ranks
        pulled = asyncio.create_task(target.kv.hold())
        call = asyncio.create_task(harness.generate([1] * 100))
        await asyncio.sleep(0)  # `hold` has begun
        at_gate, reached = target.kv.at_gate, target.kv.at_gate.set

        def reached_while_the_prompt_is_under_way() -> None:
            source.gate.clear()
            reached()

        at_gate.set = reached_while_the_prompt_is_under_way  # type: ignore[method-assign]
        await pulled
        await asyncio.wait_for(source.at_gate.wait(), 5)
        target.kv.gate.set()
        (session,) = [live.relay for live in harness.home.serving._live.values()]
        await eventually(lambda: session.state.moved and session.state.moving is None)
        assert session.state.phase is Phase.PREFILL
        await source.die()
        assert (await call).token_ids == continuation([1] * 100, 8)
        await eventually(lambda: target.kv.attempts.keys() <= target.kv.ended)


async def test_a_lost_prefill_rank_and_a_writer_that_is_late_to_stop_harm_nobody_else():
    """The request goes on holding its reservation, and its lease would be prolonged, when its prompt's set has forgotten it."""
    async with cluster(prefill={}, timings=replace(FAST, lease_s=0.15)) as harness:
        source, target = harness.ranks
        end_pull, go, prolonged = target.kv.end_pull, asyncio.Event(), asyncio.Event()

        async def late(request):
            await go.wait()
            return await end_pull(request)

        pulled = asyncio.create_task(target.kv.hold())
        call = asyncio.create_task(harness.generate(PROMPT))
        await pulled
        (session,) = [live.relay for live in harness.home.serving._live.values()]
        target.kv.end_pull = late
        await source.die()
        await eventually(lambda: harness.coordinator.sets[0].epoch > 1)
        renew = session._work.mover.renew

        async def seen() -> None:
            await renew()
            prolonged.set()

        session._work.mover.renew = seen
        failed = asyncio.create_task(harness.coordinator.failed())
        await asyncio.wait({failed, asyncio.create_task(prolonged.wait())}, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert prolonged.is_set() and not failed.done()
        failed.cancel()
        go.set()
        assert (await call).token_ids == continuation(PROMPT, 8)


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


@pytest.mark.parametrize("moment", ["prefill", "moving", "decode"])
async def test_a_lost_decode_rank_ends_its_requests_and_the_prompts_side_keeps_nothing(moment):
    async with cluster(prefill=ONE, pcp=2, dcp=2) as harness:
        source, target = harness.ranks[0], harness.ranks[1]
        if moment == "prefill":
            holding = asyncio.create_task(source.hold())
        elif moment == "moving":
            target.kv.gate.clear()
        call = asyncio.create_task(harness.generate(PROMPT, max_tokens=80))
        if moment == "prefill":
            await holding
        elif moment == "moving":
            await eventually(lambda: target.kv.writing)
        else:
            await eventually(lambda: len(target.steps) > 2)
        await harness.ranks[2].die()
        heard = await call
        assert isinstance(heard.error, errors.Unavailable) and heard.error.retryable and "rank 2" in heard.error.message
        source.gate.set()
        await harness.replace(2)
        await harness.until(lambda status: status.state == "serving")
        target.kv.gate.set()
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await harness.until_idle()


async def test_several_sets_on_either_side_share_the_work():
    async with cluster(ranks=[FakeRank(rank) for rank in range(4)], prefill={"dp": 2}, dp=2) as harness:
        prompts = [[number] * 20 for number in range(1, 9)]
        heard = await asyncio.gather(*(harness.generate(prompt) for prompt in prompts))
        assert [each.token_ids for each in heard] == [continuation(prompt, 8) for prompt in prompts]
        assert {tuple(each.finished.route.decode_group) for each in heard} == {(2,), (3,)}
        assert {tuple(each.finished.route.prefill_group) for each in heard} == {(0,), (1,)}
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


async def test_an_end_that_is_no_end_for_the_prompts_side():
    """min_tokens reaches over the border: the first token may not be a stop token."""
    async with cluster(prefill={}) as harness:
        heard = await harness.generate(PROMPT[:5], ignore_eos=False, min_tokens=2, max_tokens=4)
        assert EOS not in heard.token_ids and heard.token_ids == continuation(PROMPT[:5], 4)
        assert rows_of(harness.ranks[0])[0].ban_stop and rows_of(harness.ranks[1])[0].ban_stop
        assert not rows_of(harness.ranks[1])[1].ban_stop


async def test_h19_a_row_that_fails_on_the_prompts_side_ends_its_request_alone():
    async with cluster(prefill={}) as harness:
        source = harness.ranks[0]
        source.fail_rows[1] = "logits are not finite"
        bad = asyncio.create_task(harness.generate(PROMPT))
        await harness.until_active(1)
        await eventually(lambda: harness.coordinator.handover.waiting or source.steps)
        good = await harness.generate(PROMPT[:7])
        assert good.token_ids == continuation(PROMPT[:7], 8)
        error = (await bad).error
        assert isinstance(error, errors.Internal) and error.message == "logits are not finite"
        await harness.until_idle()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_h4_a_frozen_rank_in_the_middle_of_a_move_keeps_no_block_from_the_others(side):
    async with cluster(prefill={"pcp": 2, "dcp": 2}, timings=replace(FAST, poll_deadline_s=0.3, beside_s=0.2)) as harness:
        target = harness.ranks[2]
        target.kv.gate.clear()
        call = asyncio.create_task(harness.generate(PROMPT))
        await eventually(lambda: target.kv.writing and len(harness.ranks[0].steps) >= 3)
        victim = harness.ranks[1 if side == "prefill" else 2]
        victim.frozen = True
        await harness.until(lambda status: status.state == "degraded")
        if side == "prefill":
            target.kv.gate.set()
            assert (await call).token_ids == continuation(PROMPT, 8)
        else:
            assert "rank 2" in (await call).error.message
        await victim.die()
        await harness.replace(victim.rank)
        await harness.until(lambda status: status.state == "serving")
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await harness.until_idle()


async def test_h4_fifty_clients_leave_while_the_prompts_side_is_lost():
    async with cluster(prefill={}, max_num_seqs=8) as harness:
        target = harness.ranks[1]
        target.kv.gate.clear()
        calls = [harness.call([*PROMPT, number]) for number in range(50)]
        tasks = [asyncio.create_task(listen(call)) for call in calls]
        await harness.until_active(50)
        await eventually(lambda: target.kv.writing)
        await harness.ranks[0].die()
        for call in calls:
            call.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        target.kv.gate.set()
        await harness.replace(0)
        await harness.until(lambda status: status.state == "serving")
        await harness.until_idle()
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await harness.until_idle()


async def test_text_that_is_stuck_ends_the_request_on_both_sides(monkeypatch):
    async with cluster(prefill={}, timings=replace(FAST, text_s=0.2)) as harness:
        harness.ranks[1].kv.gate.clear()
        with blocked(monkeypatch, text_worker, "to_text", to_text):
            heard = await harness.generate(PROMPT)
            assert heard.error.message == "the text thread has finished nothing for 0.2 s"
        harness.ranks[1].kv.gate.set()
        await harness.until(lambda status: status.state == "serving")
        await harness.until_idle()
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await harness.until_idle()


async def test_a_first_token_that_cannot_be_delivered_ends_the_request_on_both_sides():
    async with cluster(prefill={}) as harness:
        heard = await harness.generate(PROMPT, stop=["?"])
        assert isinstance(heard.error, errors.Internal) and "detokenisation" in heard.error.message
        await harness.until_idle()


async def test_a_lease_that_cannot_be_ended_is_over_once_its_rank_is_lost():
    async with cluster(prefill={}) as harness:
        source = harness.ranks[0]
        asked = asyncio.Event()

        async def never(request):
            asked.set()
            await asyncio.Event().wait()

        source.kv.end_lease = never
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await asyncio.wait_for(asked.wait(), 5)
        await source.die()
        await harness.replace(0)
        await harness.until(lambda status: status.state == "serving")
        await harness.until_idle()


@pytest.mark.parametrize("call", ["end_pull", "end_lease"])
async def test_a_rank_that_never_ends_a_transfer_is_fenced(call):
    """It answers everything else."""
    async with cluster(prefill={}, timings=replace(FAST, pull_s=0.3, beside_s=0.1)) as harness:
        rank = harness.ranks[0 if call == "end_lease" else 1]
        rank.kv.failures = [FINAL] if call == "end_pull" else []

        async def never(request):
            await asyncio.Event().wait()

        setattr(rank.kv, call, never)
        heard = await harness.generate(PROMPT)
        if call == "end_pull":
            assert "rank 1: it has not ended a transfer for 0.3 s" in heard.error.message
        else:
            assert heard.token_ids == continuation(PROMPT, 8)
        status = await harness.until(lambda status: status.state == "degraded")
        assert status.ranks[rank.rank].state == "lost"
        await rank.die()
        await harness.replace(rank.rank)
        await harness.until(lambda status: status.state == "serving")
        assert (await harness.generate(PROMPT)).token_ids == continuation(PROMPT, 8)
        await harness.until_idle()
