"""What users see: events, refusals, ends."""

import asyncio
import math
import threading
from random import Random

import grpc.aio
import pytest

from coordinator.app import Options
from coordinator.inference_service import InferenceServicer
from cp_layout.blocks import BlockHasher
from cp_wire import errors
from cp_wire.pb import common_pb2, coordinator_pb2
from tests.coordinator.fake_rank import EOS, continuation
from tests.coordinator.harness import cluster, eventually, letters, listen

SHAPES = [{}, {"pcp": 2, "dcp": 2}, {"tp": 2, "dcp": 2, "interleave": 1}, {"tp": 2, "pcp": 2, "dcp": 4, "interleave": 2}]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: ",".join(f"{k}{v}" for k, v in shape.items()) or "single")
async def test_requests_together_equal_requests_alone(shape):
    async with cluster(**shape) as harness:
        prompts = [[1], [2, 3], list(range(10, 31)), [7] * 40, [8] * 9]
        heard = await asyncio.gather(*(harness.generate(prompt, max_tokens=12) for prompt in prompts))
        for prompt, one in zip(prompts, heard, strict=True):
            assert one.error is None
            assert one.token_ids == continuation(prompt, 12)
            assert one.text == letters(one.token_ids)
            assert one.finished.finish_reason == "length"
            assert one.finished.completion_tokens == 12
            assert one.finished.prompt_tokens == len(prompt) == one.accepted.prompt_tokens
        await harness.until_idle()


async def test_route_names_ranks_and_shards():
    async with cluster(pcp=2, dcp=2) as harness:
        route = (await harness.generate([1, 2])).finished.route
        assert (list(route.ranks), route.cp, list(route.decode_group), route.reason) == ([0, 1], 2, [0, 1], "static")


async def test_chat_and_text_become_tokens_and_text():
    async with cluster() as harness:
        chat = coordinator_pb2.ChatPrompt(messages=[coordinator_pb2.ChatMessage(role="user", content="hi")])
        heard = await listen(harness.inference.Generate(coordinator_pb2.GenerateRequest(chat=chat, max_tokens=3), timeout=5))
        prompt = [ord(char) % EOS for char in "user:hi\n"]
        assert heard.token_ids == continuation(prompt, 3)


async def test_completions_share_no_list_of_digests():
    """Each adds those of its own output."""
    async with cluster() as harness:
        harness.ranks[0].gate.clear()
        task = asyncio.create_task(harness.generate([1] * 9, n=2, max_tokens=2))
        await eventually(lambda: any(active.lives for active in harness.coordinator.admission.active.values()))
        (active,) = harness.coordinator.admission.active.values()
        first, second = (live.request.digests for live in active.lives)
        assert len(first) == 2 and first == second and first is not second
        harness.ranks[0].gate.set()
        await task


@pytest.mark.parametrize("min_tokens", [0, 2, 6])
async def test_stop_strings_wait_for_min_tokens(min_tokens):
    """A stop string of one letter, which the output has at index 1, 2 or later, and again."""
    output = continuation([3], 60)
    letter = letters(output)[1]
    end = next(index for index in range(max(1, min_tokens), 60) if letters(output)[index] == letter)
    async with cluster() as harness:
        heard = await harness.generate([3], max_tokens=60, min_tokens=min_tokens, stop=[letter])
        assert heard.finished.finish_reason == "stop"
        assert heard.finished.completion_tokens == end + 1 > min_tokens
        assert heard.text == letters(output)[:end]


async def test_a_prompt_is_hashed_on_the_prompts_thread(monkeypatch):
    threads = {}
    extend = BlockHasher.extend

    def spy(self, prev, tokens):
        threads.setdefault(threading.current_thread().name.split("_")[0], []).append(list(tokens))
        return extend(self, prev, tokens)

    monkeypatch.setattr(BlockHasher, "extend", spy)
    prompt = list(range(50, 90))
    async with cluster(pcp=2, dcp=2) as harness:
        assert (await harness.generate(prompt, max_tokens=2, cache_salt="one")).finished.cached_tokens == 0
        assert (await harness.generate(prompt, max_tokens=2, cache_salt="one")).finished.cached_tokens == 32
        assert (await harness.generate(prompt, max_tokens=2, cache_salt="two")).finished.cached_tokens == 0
    assert threads == {"tokenise": [prompt[start : start + 4] for start in range(0, 40, 4)] * 3}


async def test_max_tokens_default_and_drawn_seed():
    async with cluster(options=Options(seed=7)) as harness:
        heard = await harness.generate([1, 2, 3], max_tokens=2)
        assert heard.accepted.seed == Random(7).getrandbits(64)
        assert heard.accepted.request_id
        given = await harness.generate([1], seed=0)
        assert given.accepted.seed == 0
        second = Random(7)
        second.getrandbits(64)
        assert (await harness.generate([1])).accepted.seed == second.getrandbits(64), "a given seed uses up no drawn one"
        request = coordinator_pb2.GenerateRequest(text="ab", ignore_eos=True)
        assert len((await listen(harness.inference.Generate(request, timeout=10))).token_ids) == 126  # max_model_len 128 - 2


async def test_stop_string_cuts_text_tokens_and_usage():
    async with cluster() as harness:
        whole = continuation([5, 6], 30)
        stop = letters(whole[9:12])
        first = letters(whole).find(stop)
        heard = await harness.generate([5, 6], max_tokens=30, stop=[stop])
        assert heard.finished.finish_reason == "stop"
        assert heard.text == letters(whole)[:first]
        assert heard.token_ids == whole[: first + 3]
        assert heard.finished.completion_tokens == first + 3
        await harness.until_idle()


async def test_stop_token_is_counted_but_not_shown():
    async with cluster() as harness:
        whole = continuation([5, 6], 30)
        index = whole.index(whole[7])
        heard = await harness.generate([5, 6], max_tokens=30, stop_token_ids=[whole[7]])
        assert heard.token_ids == whole[: index + 1]
        assert heard.text == letters(whole[:index])
        assert heard.finished.finish_reason == "stop"


async def test_logprobs_come_with_their_tokens():
    async with cluster() as harness:
        heard = await harness.generate([1], max_tokens=5, top_logprobs=1)
        for event in heard.events[1:-1]:
            assert len(event.tokens.logprobs) == len(event.tokens.token_ids)
        assert heard.finished.completion_tokens == 5
        plain = await harness.generate([2], max_tokens=5)
        assert not any(event.tokens.logprobs for event in plain.events[1:-1])


async def test_f2_prefix_hit_is_reported_in_whole_virtual_blocks():
    async with cluster(pcp=2, dcp=2) as harness:
        prompt = list(range(17))  # two virtual blocks of 8 and one token
        first, second = await harness.generate(prompt), await harness.generate(prompt)
        assert (first.finished.cached_tokens, second.finished.cached_tokens) == (0, 16)
        assert second.token_ids == first.token_ids
        other = await harness.generate(prompt, cache_salt="somebody else")
        assert other.finished.cached_tokens == 0
        counts = {(each.decode_mode, each.gather): each.steps for each in (await harness.status()).step_counts}
        assert counts[common_pb2.DECODE_MODE_REPLICATED, common_pb2.GATHER_NONE] >= 21  # three requests, 8 tokens each
        assert sum(steps for (mode, _), steps in counts.items() if mode == common_pb2.DECODE_MODE_OWNER) >= 3  # prompts
        cache = (await harness.status()).prefix_cache
        assert (cache.hit_unit_tokens, cache.hit_tokens, cache.queried_tokens) == (8, 16, 51)


BAD = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": 126}, "max_tokens"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["y" * 257]}, "stop"),
    ({"stop_token_ids": [96]}, "stop_token_ids"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"request_id": "x" * 257}, "request_id"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
]


async def test_l4_bad_requests_are_refused_and_good_ones_follow():
    async with cluster() as harness:
        for fields, field in BAD:
            heard = await harness.generate([1, 2, 3], **fields)
            assert isinstance(heard.error, errors.InvalidRequest), fields
            assert heard.error.field == field
            assert not heard.events
            assert (await harness.generate([1], max_tokens=1)).error is None
        for prompt in ([], [96], [0] * 128, [0] * 500):
            assert isinstance((await harness.generate(prompt)).error, errors.InvalidRequest)
        nothing = await listen(harness.inference.Generate(coordinator_pb2.GenerateRequest(max_tokens=1), timeout=5))
        assert isinstance(nothing.error, errors.InvalidRequest)
        long_text = coordinator_pb2.GenerateRequest(text="a" * (256 * 128 + 1))
        assert isinstance((await listen(harness.inference.Generate(long_text, timeout=5))).error, errors.InvalidRequest)
        crowd = coordinator_pb2.ChatPrompt(messages=[coordinator_pb2.ChatMessage(role="user")] * 4097)
        crowded = await listen(harness.inference.Generate(coordinator_pb2.GenerateRequest(chat=crowd), timeout=5))
        assert isinstance(crowded.error, errors.InvalidRequest) and "4097 messages" in crowded.error.message
        assert isinstance((await harness.generate([1], model="another")).error, errors.Unknown)
        assert (await harness.generate([1], model="tiny")).error is None
        assert len(harness.scheduler.free_blocks) == 1 and not harness.coordinator.admission.active


async def test_g1_request_larger_than_the_pool_is_refused_at_once():
    async with cluster(kv_cache_tokens_per_rank=32) as harness:
        fits = await harness.generate([1] * 16, max_tokens=17)  # the last token's KV is never written
        assert len(fits.token_ids) == 17
        assert isinstance((await harness.generate([1] * 16, max_tokens=18)).error, errors.InvalidRequest)
        assert (await harness.generate([1])).error is None


async def test_h16_same_id_twice_at_once_is_refused_and_free_afterwards():
    async with cluster() as harness:
        held = asyncio.create_task(harness.ranks[0].hold())
        first = asyncio.create_task(harness.generate([1, 2], request_id="a"))
        await held
        second = await harness.generate([3], request_id="a")
        assert isinstance(second.error, errors.Duplicate)
        harness.ranks[0].gate.set()
        assert (await first).token_ids == continuation([1, 2], 8)
        assert (await harness.generate([3], request_id="a")).error is None


async def test_full_queue_says_when_to_come_back():
    async with cluster(max_num_seqs=1, options=Options(max_waiting=1)) as harness:
        held = asyncio.create_task(harness.ranks[0].hold())
        running = asyncio.create_task(harness.generate([1]))
        await held
        queued = asyncio.create_task(harness.generate([2]))
        await harness.until_queued(2)
        refused = await harness.generate([3])
        assert isinstance(refused.error, errors.Exhausted)
        assert refused.error.retry_after_s == 1
        harness.ranks[0].gate.set()
        assert (await running).error is None and (await queued).error is None


async def test_poison_ends_its_own_request_only():
    async with cluster() as harness:
        good = asyncio.create_task(harness.generate([4], max_tokens=60))
        poisoned = await harness.generate([5], stop=["?"])
        assert isinstance(poisoned.error, errors.Internal)
        request = coordinator_pb2.GenerateRequest(text="!", max_tokens=3)
        assert isinstance((await listen(harness.inference.Generate(request, timeout=5))).error, errors.Internal)
        assert (await good).token_ids == continuation([4], 60)
        await harness.until_idle()
        assert not harness.coordinator.admission.active


async def test_row_error_ends_its_own_request_only():
    async with cluster() as harness:
        harness.ranks[0].fail_rows[1] = "logits are not finite"
        heard = await asyncio.gather(harness.generate([1]), harness.generate([2]))
        bad, good = sorted(heard, key=lambda one: one.error is None)
        assert isinstance(bad.error, errors.Internal) and "not finite" in bad.error.message
        assert good.token_ids in (continuation([1], 8), continuation([2], 8))
        await harness.until_idle()


async def test_h4_a_client_that_leaves_during_a_write_is_no_failure_of_the_call(caplog):
    class Gone:
        """A call whose client is there for one event only."""

        written = 0

        async def write(self, event: coordinator_pb2.GenerateResponse) -> None:
            self.written += 1
            if self.written > 1:
                raise grpc.aio.InternalError("a message could not be sent")

    async with cluster() as harness:
        call, servicer = Gone(), InferenceServicer(harness.coordinator.admission, 1)
        request = coordinator_pb2.GenerateRequest(max_tokens=90, ignore_eos=True)
        request.tokens.ids.extend([1, 2, 3])
        await servicer.Generate(request, call)
        assert call.written == 2 and not harness.coordinator.admission.active
        await harness.until_idle()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
