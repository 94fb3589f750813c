"""Sampling over a whole cluster: the same seed gives the same tokens, and a prompt the same scores, whatever happens around."""

import math
import random
from dataclasses import replace

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from coordinator.plan import Sampling
from coordinator.seeds import completion_seed
from rank_server import logprobs
from tests.inproc import Shape, cluster
from tests.tiny_models import greedy_reference, logits_reference

B = 4
MODEL = {"heads": 8, "kv_heads": 2}
DCP2 = {"pcp": 2, "dcp": 2}
SHAPES = [
    Shape(block_size=B),
    Shape(**DCP2, interleave=1, block_size=B, budget=5),
    Shape(**DCP2, interleave=B, block_size=B, blocks=6),
    Shape(tp=2, pcp=2, dcp=2, interleave=2, block_size=B, budget=7),
]
IDS = ["alone", "chunked", "preempted", "tp2"]


def prompt_of(length, seed=0):
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(200) for _ in range(length)]


PROMPTS = [prompt_of(length, seed=length) for length in (13, 9, 17, 5)]
WANTED = [
    Sampling(temperature=0.0, repetition_penalty=1.4, max_tokens=14),
    Sampling(temperature=0.9, seed=3, presence_penalty=1.5, frequency_penalty=0.8, max_tokens=14),
    Sampling(temperature=1.2, seed=4, min_p=0.05, repetition_penalty=0.7, frequency_penalty=-0.5, max_tokens=14),
    Sampling(temperature=0.7, seed=5, top_k=30, min_p=0.01, logit_bias=((3, 6.0), (17, -100.0)), max_tokens=14),
]


def reference(path, prompt, wanted):
    """Each token from the whole sequence anew, by the documented order; greedy and penalties only."""
    tokens = list(prompt)
    for _ in range(wanted.max_tokens):
        logits = logits_reference(path, tokens)[-1].clone()
        for token, bias in wanted.logit_bias:
            logits[token] += bias
        if wanted.repetition_penalty != 1:
            process = RepetitionPenaltyLogitsProcessor(wanted.repetition_penalty)
            logits = process(torch.tensor([tokens]), logits[None])[0]
        for token in set(tokens[len(prompt) :]):
            logits[token] -= wanted.presence_penalty + wanted.frequency_penalty * tokens[len(prompt) :].count(token)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_penalties_and_biases_equal_the_reference(tiny, shape):
    path = tiny(**MODEL)
    wanted = [
        Sampling(temperature=0.0, repetition_penalty=1.4, max_tokens=12),
        Sampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=1.0, max_tokens=12),
        Sampling(temperature=0.0, frequency_penalty=-2.0, repetition_penalty=0.5, max_tokens=12),
        Sampling(temperature=0.0, logit_bias=((3, 4.0), (9, 5.5)), presence_penalty=1.0, max_tokens=12),
    ]
    expected = [reference(path, prompt, each) for prompt, each in zip(PROMPTS, wanted, strict=True)]
    plain = [greedy_reference(path, prompt, 12) for prompt in PROMPTS]
    assert all(one != other for one, other in zip(expected, plain, strict=True)), "a penalty that changes nothing tests nothing"
    with cluster(path, shape) as running:
        assert [got.token_ids for got in running.generate(PROMPTS, 12, wanted)] == expected


def test_the_same_seed_gives_the_same_tokens_whatever_the_batch_the_shape_or_a_preemption(tiny):
    path = tiny(**MODEL)
    with cluster(path, SHAPES[0]) as alone:
        expected = [alone.generate([p], 14, [s])[0].token_ids for p, s in zip(PROMPTS, WANTED, strict=True)]
    preempted = 0
    for shape in SHAPES:
        with cluster(path, shape) as running:
            got = running.generate(PROMPTS, 14, WANTED)
            assert [g.token_ids for g in got] == expected
            preempted += sum(g.num_preemptions for g in got)
    assert preempted > 0


@pytest.mark.parametrize("budget", [5, 64])
def test_tokens_that_the_sampling_rank_never_saw_count_too(tiny, budget):
    """A prefix hit: the plan names the cached tokens, for this request only, and a decode row grows by nothing."""
    path = tiny(**MODEL)
    prompt = prompt_of(25)
    wanted = Sampling(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5, max_tokens=10)
    with cluster(path, Shape(**DCP2, interleave=B, block_size=B, budget=budget)) as running:
        (cold,) = running.generate([prompt], 10, [wanted])
        (plain,) = running.generate([prompt], 10)
        (warm,) = running.generate([prompt], 10, [wanted])
        assert (cold.num_cached_tokens, plain.num_cached_tokens, warm.num_cached_tokens) == (0, 24, 24)
        assert cold.token_ids == warm.token_ids == reference(path, prompt, wanted)
        assert plain.token_ids == greedy_reference(path, prompt, 10)
        histories = [len(a.cached_token_ids) for step in running.steps for a in step.admitted]
        assert histories == [0, 0, 24]


def test_histories_end_with_their_requests(tiny):
    with cluster(tiny(**MODEL), Shape(block_size=B)) as running:
        running.generate(PROMPTS, 14, WANTED)
        assert all(executor._sequences.blocks_in_use == 0 for executor in running.executors)
        assert all(not executor._sequences._sequences for executor in running.executors)


def expected_scores(path, prompt):
    logits = torch.log_softmax(logits_reference(path, prompt).double(), 1)
    return {position: float(logits[position - 1, prompt[position]]) for position in range(1, len(prompt))}


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_f13_prompt_logprobs_equal_the_reference_in_any_chunks_and_are_reported_once(tiny, shape):
    path = tiny(**MODEL)
    wanted = Sampling(temperature=0.0, prompt_logprobs=2, max_tokens=8)
    plain = Sampling(temperature=0.0, max_tokens=8)
    with cluster(path, shape) as running:
        got = running.generate(PROMPTS, 8, [wanted, plain, wanted, wanted])
        for prompt, each, sampling in zip(PROMPTS, got, (wanted, plain, wanted, wanted), strict=True):
            assert each.token_ids == greedy_reference(path, prompt, 8)
            scores = {position: score.sampled for position, score in each.prompt_logprobs.items()}
            assert scores == (pytest.approx(expected_scores(path, prompt), abs=1e-3) if sampling is wanted else {})
            for position, score in each.prompt_logprobs.items():
                best = logits_reference(path, prompt)[position - 1].topk(2).indices.tolist()
                assert [top.token_id for top in score.top] == best


def test_f13_a_second_identical_request_is_scored_as_the_first(tiny):
    """It ignores the prefix cache for its lookup, though not for those who come after it."""
    path = tiny(**MODEL)
    prompt = prompt_of(25)
    wanted = Sampling(temperature=0.0, prompt_logprobs=0, max_tokens=3)
    with cluster(path, Shape(**DCP2, interleave=B, block_size=B)) as running:
        first, second = (running.generate([prompt], 3, [wanted])[0] for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
        assert first.prompt_logprobs == second.prompt_logprobs
        assert sorted(second.prompt_logprobs) == list(range(1, 25))
        (third,) = running.generate([prompt], 3)
        assert third.num_cached_tokens == 24


def test_a_preempted_prompt_is_scored_on_from_where_it_was(tiny):
    """The pool is too small for both; whoever gives way in the middle of its prompt hits its own blocks when it resumes."""
    path = tiny(**MODEL)
    old, young = prompt_of(9), prompt_of(22)
    with cluster(path, Shape(block_size=B, blocks=9, budget=4)) as running:
        requests = [
            running.submit(old, Sampling(temperature=0.0, max_tokens=24)),
            running.submit(young, Sampling(temperature=0.0, prompt_logprobs=0, max_tokens=4)),
        ]
        got = running.finish(requests)
        assert got[1].num_preemptions > 0
        scores = {position: score.sampled for position, score in got[1].prompt_logprobs.items()}
        assert scores == pytest.approx(expected_scores(path, young), abs=1e-3)
        assert got[1].token_ids == greedy_reference(path, young, 4)


def test_d12_prompts_are_scored_in_slices_that_all_members_take_part_in(tiny, monkeypatch):
    """Slices of three rows: five tokens of a chunk are scored in two, and each is one gather of the vocabulary."""
    path = tiny(**MODEL)
    monkeypatch.setattr(logprobs, "SLICE_BYTES", 3 * 4 * 320)
    wanted = Sampling(temperature=0.0, prompt_logprobs=1, max_tokens=2)
    plain = replace(wanted, prompt_logprobs=None)
    with cluster(path, Shape(tp=2, block_size=B, budget=5)) as running:
        (got,) = running.generate([prompt_of(15)], 2, [wanted])
        scores = {position: each.sampled for position, each in got.prompt_logprobs.items()}
        assert scores == pytest.approx(expected_scores(path, prompt_of(15)), abs=1e-3)
        assert all(len({result.collectives for result in results}) == 1 for results in running.results)
        scored = [results[0].collectives for results in running.results[:3]]
        running.results.clear()
        running.generate([prompt_of(15, seed=1)], 2, [plain])
        unscored = [results[0].collectives for results in running.results[:3]]
        assert [more - less for more, less in zip(scored, unscored, strict=True)] == [2, 2, 2]


def test_logprobs_of_the_output_are_those_of_the_raw_logits(tiny):
    path = tiny(**MODEL)
    prompt = prompt_of(11)
    wanted = Sampling(temperature=0.8, seed=2, repetition_penalty=1.5, logprobs=True, max_tokens=6)
    with cluster(path, Shape(**DCP2, interleave=B, block_size=B)) as running:
        (got,) = running.generate([prompt], 6, [wanted])
    raw = torch.log_softmax(logits_reference(path, prompt + got.token_ids).double(), 1)
    expected = [float(raw[len(prompt) - 1 + i, token]) for i, token in enumerate(got.token_ids)]
    assert got.logprobs == pytest.approx(expected, abs=1e-3)


def test_completions_share_the_prompt_and_draw_as_if_alone(tiny):
    path = tiny(**MODEL)
    prompt = prompt_of(26)
    first = Sampling(temperature=1.0, seed=9, repetition_penalty=1.1, max_tokens=8)
    samplings = [replace(first, seed=completion_seed(9, index)) for index in range(4)]
    with cluster(path, Shape(block_size=B)) as alone:
        expected = [alone.generate([prompt], 8, [each])[0].token_ids for each in samplings]
    assert len({tuple(tokens) for tokens in expected}) == 4
    with cluster(path, Shape(**DCP2, interleave=B, block_size=B, budget=10)) as running:
        leader = running.submit(prompt, samplings[0])
        got = running.finish([leader, *(running.submit(prompt, each, leader) for each in samplings[1:])])
        assert [each.token_ids for each in got] == expected
        assert [each.num_cached_tokens for each in got] == [0, 24, 24, 24]


def test_nan_logits_fail_their_request_alone_and_the_rank_lives(tiny):
    """The prompt of one request meets an embedding that is broken; another request runs beside and one after it."""
    path = tiny(**MODEL)
    poisoned, healthy = [7, 250, 9], prompt_of(9)
    with cluster(path, Shape(block_size=B)) as running:
        running.executors[0]._weights.embedding[250] = math.nan
        scored = Sampling(temperature=0.0, prompt_logprobs=0, max_tokens=4)
        plain = Sampling(temperature=0.0, max_tokens=4)
        got = running.generate([poisoned, healthy, poisoned], 4, [plain, plain, scored])
        assert [each.finish_reason for each in got] == ["error", "length", "error"]
        assert got[1].token_ids == greedy_reference(path, healthy, 4)
        (after,) = running.generate([healthy], 4, [scored])
        assert after.token_ids == greedy_reference(path, healthy, 4)
        assert len(after.prompt_logprobs) == len(healthy) - 1
