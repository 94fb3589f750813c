"""What users see of several completions, log-probabilities and penalties: events, refusals, ends."""

import asyncio
import itertools
import math

import pytest

from coordinator.app import Options
from coordinator.seeds import completion_seed
from cp_wire import errors
from cp_wire.pb import coordinator_pb2
from tests.coordinator.fake_rank import continuation
from tests.coordinator.harness import cluster, letters


def outputs(heard):
    """Completion → its tokens, and its text."""
    tokens, texts = {}, {}
    for event in heard.events:
        if event.WhichOneof("event") == "tokens":
            tokens.setdefault(event.tokens.index, []).extend(event.tokens.token_ids)
            texts[event.tokens.index] = texts.get(event.tokens.index, "") + event.tokens.text
    return tokens, texts


def prompt_pieces(heard):
    return [event.prompt_logprobs for event in heard.events if event.WhichOneof("event") == "prompt_logprobs"]


@pytest.mark.parametrize("shape", [{}, {"pcp": 2, "dcp": 2}], ids=["single", "dcp2"])
async def test_completions_share_one_prompt_one_stream_and_one_end(shape):
    async with cluster(**shape) as harness:
        prompt = list(range(30))
        heard = await harness.generate(prompt, max_tokens=6, n=3, seed=7)
        assert heard.error is None
        tokens, texts = outputs(heard)
        assert tokens == {index: continuation(prompt, 6) for index in range(3)}
        assert texts == {index: letters(tokens[index]) for index in range(3)}
        finished = heard.finished
        assert (finished.prompt_tokens, finished.completion_tokens, finished.cached_tokens) == (30, 18, 0)
        assert [(end.finish_reason, end.completion_tokens) for end in finished.completions] == [("length", 6)] * 3
        assert finished.finish_reason == "length"
        admitted = [admission for step in harness.ranks[0].steps for admission in step.admitted]
        assert [admission.sampling.seed for admission in admitted] == [completion_seed(7, index) for index in range(3)]
        virtual = 4 * shape.get("dcp", 1)
        assert [admission.num_cached_tokens for admission in admitted] == [0, *[29 // virtual * virtual] * 2]
        again = await harness.generate(prompt, max_tokens=1, n=2)
        assert again.finished.cached_tokens == 29 // virtual * virtual
        await harness.until_idle()


async def test_each_completion_ends_for_its_own_reason():
    """Stop strings are matched completion by completion; all of them stop here, and each counts its own tokens."""
    async with cluster() as harness:
        whole = continuation([5, 6], 30)
        stop = letters(whole[9:12])
        end = letters(whole).find(stop) + 3
        heard = await harness.generate([5, 6], max_tokens=30, stop=[stop], n=2)
        assert [(each.finish_reason, each.completion_tokens) for each in heard.finished.completions] == [("stop", end)] * 2
        assert outputs(heard)[1] == {index: letters(whole[: end - 3]) for index in range(2)}
        await harness.until_idle()


async def test_an_abort_ends_all_completions_with_one_event():
    async with cluster() as harness:
        call = harness.call([1, 2, 3], request_id="several", n=3, max_tokens=50)
        await harness.ranks[0].hold()
        assert (await call.read()).WhichOneof("event") == "accepted"
        await harness.inference.Abort(coordinator_pb2.AbortRequest(request_id="several"), timeout=5)
        finished = (await call.read()).finished
        assert finished.finish_reason == "abort"
        assert [end.finish_reason for end in finished.completions] == ["abort"] * 3
        harness.ranks[0].gate.set()
        await harness.until_idle()


async def test_a_completion_that_fails_ends_the_request_and_frees_the_others():
    async with cluster() as harness:
        rank = harness.ranks[0]
        rank.fail_rows[2] = "the logits are not finite"
        failed, other = await asyncio.gather(
            harness.generate([1, 2, 3], n=3, max_tokens=100), harness.generate([9, 8], max_tokens=5)
        )
        assert isinstance(failed.error, errors.Internal)
        assert "not finite" in str(failed.error)
        assert other.token_ids == continuation([9, 8], 5)
        await harness.until_idle()


async def test_f13_a_prompt_is_scored_position_by_position_and_so_is_a_second_one():
    async with cluster(max_num_batched_tokens=8) as harness:
        prompt = list(range(40, 61))
        for _ in range(2):
            heard = await harness.generate(prompt, max_tokens=2, prompt_logprobs=0)
            pieces = prompt_pieces(heard)
            positions = [position for piece in pieces for position in piece.positions]
            starts = list(itertools.accumulate((len(piece.positions) for piece in pieces), initial=0))
            assert [piece.start for piece in pieces] == starts[:-1]
            assert not positions[0].ByteSize()
            assert [position.sampled for position in positions[1:]] == [-float(token) for token in prompt[1:]]
            assert heard.finished.cached_tokens == 0
            assert heard.token_ids == continuation(prompt, 2)
            kinds = [event.WhichOneof("event") for event in heard.events]
            assert kinds.index("tokens") > max(i for i, kind in enumerate(kinds) if kind == "prompt_logprobs")
        assert len(pieces) > 1


async def test_a_prompt_of_one_token_has_one_empty_entry():
    async with cluster() as harness:
        (piece,) = prompt_pieces(await harness.generate([5], max_tokens=1, prompt_logprobs=3))
        assert [position.ByteSize() for position in piece.positions] == [0]


async def test_a_prompt_is_scored_once_however_many_completions_it_has():
    async with cluster() as harness:
        heard = await harness.generate([5, 6, 7], max_tokens=3, prompt_logprobs=0, n=3)
        assert sum(len(piece.positions) for piece in prompt_pieces(heard)) == 3
        assert len(outputs(heard)[0]) == 3


async def test_scores_of_other_positions_than_asked_end_the_epoch():
    async with cluster() as harness:
        harness.ranks[0].drop_scores = 1
        heard = await harness.generate([5, 6, 7], prompt_logprobs=0)
        assert isinstance(heard.error, errors.Unavailable)
        assert "wanted 2 prompt scores" in heard.error.message
        harness.ranks[0].drop_scores = 0
        await harness.until(lambda status: status.state == "serving")
        assert (await harness.generate([7])).token_ids == continuation([7], 8)


async def test_penalties_and_biases_reach_the_ranks_once():
    async with cluster() as harness:
        prompt = list(range(20))
        await harness.generate(prompt, max_tokens=1)
        fields = {"min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 0.5}
        heard = await harness.generate(prompt, max_tokens=4, logit_bias={9: -2.5, 3: 4.0}, logprobs=True, **fields)
        assert heard.token_ids == continuation(prompt, 4)
        first, *rest = [step for step in harness.ranks[0].steps if step.rows][-4:]
        (admitted,) = first.admitted
        sampling = admitted.sampling
        assert {name: getattr(sampling, name) for name in fields} == fields
        assert (list(sampling.bias_token_ids), list(sampling.biases), sampling.logprobs) == ([3, 9], [4.0, -2.5], True)
        assert list(admitted.cached_token_ids) == prompt[:16]
        assert not any(step.admitted for step in rest)
        assert [len(step.rows[0].token_ids) for step in rest] == [1] * 3


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 17, 2**62]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0.0, -1.0, 0.05, 10.5, math.inf, math.nan]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, -math.inf, math.nan]),
        ("logit_bias", [{0: 100.5}, {0: math.nan}, {96: 1.0}, {-1: 1.0}, {2**40: 1.0}, dict.fromkeys(range(301), 0.0)]),
        ("prompt_logprobs", [-1, 21, 2**62]),
    ],
)
async def test_l4_bad_values_are_refused_by_name_before_anything_is_reserved(field, values):
    async with cluster() as harness:
        for value in values:
            heard = await harness.generate([1, 2], **{field: value})
            assert isinstance(heard.error, errors.InvalidRequest), value
            assert heard.error.message.startswith(field)
            assert heard.accepted is None
        assert harness.ranks[0].steps == []
        assert harness.coordinator.admission.active == {}


async def test_more_completions_than_the_queue_holds_are_refused_together():
    async with cluster(options=Options(max_waiting=2)) as harness:
        heard = await harness.generate([1, 2], n=3)
        assert isinstance(heard.error, errors.Exhausted)
        assert heard.error.retryable
        assert (await harness.generate([1, 2], n=2)).finished.completion_tokens == 16
