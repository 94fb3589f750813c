"""Chunks, batches, prefix hits, preemption: none of them may change a token."""

import random

import pytest

from coordinator.plan import Sampling
from tests.inproc import Shape, cluster
from tests.tiny_models import greedy_reference

B = 4
DCP2 = {"pcp": 2, "dcp": 2}
MODEL = {"heads": 8, "kv_heads": 2}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(200) for _ in range(length)]


@pytest.mark.parametrize("interleave", [1, 2, B])
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 8, 9, 23, 24])
def test_chunk_budgets(tiny, budget, interleave):
    path = tiny(**MODEL)
    prompt = prompt_of(23)
    with cluster(path, Shape(**DCP2, interleave=interleave, block_size=B, budget=budget)) as running:
        (got,) = running.generate([prompt], 8)
        assert got.token_ids == greedy_reference(path, prompt, 8)
        assert max(step.num_tokens for step in running.steps) <= budget


@pytest.mark.parametrize("interleave", [1, B])
def test_d2_lone_last_token_is_still_prefill(tiny, interleave):
    """chunk + 1 tokens: the last chunk has one token but is no decode."""
    path = tiny(**MODEL)
    prompt = prompt_of(9)
    with cluster(path, Shape(**DCP2, interleave=interleave, block_size=B, budget=8)) as running:
        (got,) = running.generate([prompt], 6)
        assert got.token_ids == greedy_reference(path, prompt, 6)


def test_lengths_1_and_1000_in_one_batch(tiny):
    path = tiny(**MODEL)
    prompts = [prompt_of(1), prompt_of(1000), prompt_of(1, seed=3), prompt_of(10 * B * 2)]
    with cluster(path, Shape(**DCP2, interleave=B, block_size=B, blocks=200, budget=256)) as running:
        for prompt, got in zip(prompts, running.generate(prompts, 8), strict=True):
            assert got.token_ids == greedy_reference(path, prompt, 8)


@pytest.mark.parametrize("interleave", [1, B])
def test_prefix_hits_change_nothing(tiny, interleave):
    """2·V + 1 tokens sent twice hit 2·V; exactly V tokens sent twice hit nothing (one token is always recomputed)."""
    path = tiny(**MODEL)
    virtual = B * 2
    long, exact = prompt_of(2 * virtual + 1), prompt_of(virtual, seed=5)
    with cluster(path, Shape(**DCP2, interleave=interleave, block_size=B)) as running:
        for expected_hits in ((0, 0), (2 * virtual, 0)):
            got = [running.generate([prompt], 6)[0] for prompt in (long, exact)]
            assert tuple(g.num_cached_tokens for g in got) == expected_hits
            assert [g.token_ids for g in got] == [greedy_reference(path, prompt, 6) for prompt in (long, exact)]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_f1_common_prefix_is_cut_to_whole_virtual_blocks(tiny, cp):
    path = tiny(**MODEL)
    first, second = [7] * 9 + [1] * 20, [7] * 9 + [2] * 20
    with cluster(path, Shape(pcp=cp, dcp=cp, interleave=B, block_size=B)) as running:
        running.generate([first], 4)
        (got,) = running.generate([second], 8)
        assert got.num_cached_tokens == 9 // (B * cp) * (B * cp)
        assert got.token_ids == greedy_reference(path, second, 8)


@pytest.mark.parametrize("interleave", [1, B])
@pytest.mark.parametrize("budget", [4, 64])
def test_e2_preemption_changes_nothing(tiny, interleave, budget):
    path = tiny(**MODEL)
    prompts = [prompt_of(length, seed=length) for length in (13, 9, 17, 5, 11)]
    with cluster(path, Shape(**DCP2, interleave=interleave, block_size=B, blocks=8, budget=budget)) as running:
        got = running.generate(prompts, 16)
        assert sum(g.num_preemptions for g in got) > 0
        for prompt, generation in zip(prompts, got, strict=True):
            assert generation.token_ids == greedy_reference(path, prompt, 16)
        assert all(free == 8 for free in running.scheduler.free_blocks)


def test_seeded_draws_do_not_depend_on_batch_shape_or_preemption(tiny):
    path = tiny(**MODEL)
    prompts = [prompt_of(length, seed=length) for length in (13, 9, 17, 5)]
    samplings = [Sampling(temperature=0.8, top_p=0.9, top_k=40, seed=11 + i, max_tokens=12) for i in range(4)]
    with cluster(path, Shape(block_size=B)) as alone:
        expected = [alone.generate([p], 12, [s])[0].token_ids for p, s in zip(prompts, samplings, strict=True)]
    assert len({tuple(ids) for ids in expected}) == 4
    for shape in (Shape(**DCP2, interleave=1, block_size=B), Shape(**DCP2, interleave=B, block_size=B, blocks=6)):
        with cluster(path, shape) as running:
            got = running.generate(prompts, 12, samplings)
            assert [g.token_ids for g in got] == expected


def test_min_tokens_bans_stops_until_then(tiny):
    path = tiny(**MODEL)
    prompt = prompt_of(6)
    stop = greedy_reference(path, prompt, 1)[0]
    with cluster(path, Shape(**DCP2, interleave=B, block_size=B)) as running:
        (first,) = running.generate([prompt], 9, [Sampling(temperature=0.0, stop_token_ids=(stop,), max_tokens=9)])
        assert (first.token_ids, first.finish_reason) == ([stop], "stop")
        wanted = Sampling(temperature=0.0, stop_token_ids=(stop,), min_tokens=4, max_tokens=9)
        (second,) = running.generate([prompt], 9, [wanted])
        assert stop not in second.token_ids[:4]
        assert len(second.token_ids) >= 4


def test_d12_members_issue_the_same_collectives_whatever_they_own(tiny):
    path = tiny(**MODEL)
    with cluster(path, Shape(pcp=4, dcp=4, interleave=B, block_size=B)) as running:
        running.generate([[3]], 3)
        for results in running.results:
            assert len({result.collectives for result in results}) == 1


def test_i6_ranks_hold_the_blocks_that_the_coordinator_counts(tiny):
    path = tiny(**MODEL)
    blocks = 12
    with cluster(path, Shape(**DCP2, interleave=B, block_size=B, blocks=blocks)) as running:
        requests = [running.submit(prompt_of(n, n), Sampling(temperature=0.0, max_tokens=20)) for n in (9, 14, 3)]
        running.finish(requests)
        used = [result.blocks_in_use for result in running.results[-1]]
        assert used == [0, 0]
        peak = max(max(result.blocks_in_use for result in results) for results in running.results)
        assert 0 < peak <= blocks


def test_a3_decode_equals_a_fresh_prefill_on_fragmented_blocks(tiny):
    path = tiny(**MODEL)
    prompt = prompt_of(9)
    with cluster(path, Shape(pcp=4, dcp=4, interleave=2, block_size=B, blocks=16)) as running:
        running.generate([prompt_of(5, 1), prompt_of(23, 2), prompt_of(11, 3)], [2, 9, 4])
        (decoded,) = running.generate([prompt], 2)
        (fresh,) = running.generate([prompt + decoded.token_ids[:1]], 1)
        assert decoded.token_ids[1:] == fresh.token_ids
