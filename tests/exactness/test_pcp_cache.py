"""What chunks that are dealt out over replicas leave in the caches, compared with one rank that computes everything at once."""

import random

import numpy as np
import pytest
import torch

from coordinator.plan import Sampling
from cp_layout.interleave import NOT_MINE
from tests.exactness.pcp import MODEL, B, check_dealt, dealt, gathers, prompt_of
from tests.inproc import Shape, cluster
from tests.tiny_models import greedy_reference, logits_reference

PROMPT = prompt_of(23)


def committed(running, rank: int, handle: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of a request whose slots are on the rank, and their K and V [layers, 2, positions, heads, D]."""
    executor = running.executors[rank]
    sequence = executor._sequences.get(handle)
    slots = running.layout.slots(sequence.shard, sequence.block_table.numpy(), np.arange(sequence.num_computed))
    where = torch.from_numpy(np.flatnonzero(slots != NOT_MINE))
    caches = [torch.stack(executor.pool.read(layer, torch.from_numpy(slots)[where]).chunk(2, dim=1)) for layer in range(2)]
    return where, torch.stack(caches)


@pytest.fixture(scope="module")
def at_once(tiny):
    """K and V of the prompt on one rank."""
    with cluster(tiny(**MODEL), Shape(block_size=B)) as running:
        running.submit(PROMPT, Sampling(temperature=0.0, max_tokens=4))
        running.step()
        return committed(running, 0, 1)[1]


@pytest.mark.parametrize("budget", range(1, 10))
@pytest.mark.parametrize("gather", ["q", "kv"])
def test_e_every_budget_leaves_the_same_slots(tiny, at_once, budget, gather):
    grid = random.Random(budget).choice([(1, 2, 2), (1, 3, 3), (1, 4, 4)])
    _budget(tiny(**MODEL), at_once, grid, budget, gather, interleave=2)


@pytest.mark.sweep
@pytest.mark.parametrize("budget", range(1, 10))
@pytest.mark.parametrize("interleave", [1, 2, B])
@pytest.mark.parametrize("grid", [(1, 2, 1), (1, 3, 1), (1, 2, 2), (1, 3, 3), (1, 4, 4)], ids=str)
def test_e_every_budget_and_shape_leaves_the_same_slots(tiny, at_once, grid, interleave, budget):
    for gather in gathers(grid):
        _budget(tiny(**MODEL), at_once, grid, budget, gather, interleave)


def _budget(path, at_once, grid, budget, gather, interleave):
    with cluster(path, dealt(*grid, gather, interleave=interleave, budget=budget)) as running:
        request = running.submit(PROMPT, Sampling(temperature=0.0, max_tokens=4))
        for _ in range(-(-len(PROMPT) // budget)):
            running.step()
            held: set[int] = set()
            for rank in range(running.grid.world_size):
                where, got = committed(running, rank, request.handle)
                torch.testing.assert_close(got, at_once[:, :, where], rtol=1e-4, atol=1e-5)
                held |= set(where.tolist())
            assert held == set(range(min(request.num_computed, len(PROMPT))))
        assert request.num_computed == len(PROMPT)
        (got,) = running.finish([request])
        assert got.token_ids == greedy_reference(path, PROMPT, 4)
        check_dealt(running)


@pytest.mark.parametrize("budget", [5, 9, 64])
@pytest.mark.parametrize(
    ("grid", "gather"), [((1, 2, 2), "q"), ((1, 3, 3), "kv"), ((2, 2, 2), "kv"), ((1, 2, 1), "kv")], ids=str
)
def test_every_position_of_a_prompt_is_scored_once_by_whoever_holds_it(tiny, grid, gather, budget):
    """Per row against the logits of `transformers`, not only the last one."""
    path = tiny(**MODEL)
    prompts = [PROMPT, prompt_of(3), prompt_of(9)]
    scored = Sampling(temperature=0.0, prompt_logprobs=2, max_tokens=3)
    with cluster(path, dealt(*grid, gather, budget=budget, interleave=1)) as running:
        for prompt, got in zip(prompts, running.generate(prompts, 3, [scored] * 3), strict=True):
            assert sorted(got.prompt_logprobs) == list(range(1, len(prompt)))
            wanted = logits_reference(path, prompt).double().log_softmax(-1)
            for position, scores in got.prompt_logprobs.items():
                assert scores.sampled == pytest.approx(float(wanted[position - 1, prompt[position]]), abs=1e-3)
        check_dealt(running)


@pytest.mark.parametrize(("grid", "gather"), [((1, 2, 2), "q"), ((2, 2, 2), "kv"), ((1, 3, 1), "kv")], ids=str)
def test_draws_and_penalties_do_not_depend_on_who_computes_the_row(tiny, grid, gather):
    """Each owner knows all tokens of a request, also those that other replicas computed before a preemption."""
    path = tiny(**MODEL)
    prompts = [prompt_of(length, seed=length) for length in (13, 9, 17, 5)]
    samplings = [
        Sampling(temperature=0.8, top_p=0.9, top_k=40, seed=11, max_tokens=12),
        Sampling(temperature=0.9, seed=3, presence_penalty=1.5, frequency_penalty=0.8, max_tokens=12),
        Sampling(temperature=0.0, repetition_penalty=1.4, max_tokens=12),
        Sampling(temperature=1.2, seed=4, min_p=0.05, frequency_penalty=-0.5, max_tokens=12),
    ]
    with cluster(path, Shape(block_size=B)) as alone:
        expected = [alone.generate([p], 12, [s])[0].token_ids for p, s in zip(prompts, samplings, strict=True)]
    for blocks in (64, 12 // grid[2] + 2):
        with cluster(path, dealt(*grid, gather, budget=7, blocks=blocks)) as running:
            got = running.generate(prompts, 12, samplings)
            assert [each.token_ids for each in got] == expected
            assert (sum(each.num_preemptions for each in got) > 0) == (blocks < 64)
            check_dealt(running)


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize(("grid", "gather"), [((1, 2, 2), "q"), ((1, 2, 2), "kv"), ((1, 3, 1), "kv")], ids=str)
def test_a_prompt_whose_tail_is_not_finite_fails_alone(tiny, grid, gather, scored):
    """Its head is finite: one replica may answer for rows that another one can't."""
    path = tiny(**MODEL)
    poisoned, healthy = [*prompt_of(14), 250, 9, 8, 7], prompt_of(9)
    with cluster(path, dealt(*grid, gather)) as running:
        for executor in running.executors:
            executor._weights.embedding[250] = float("nan")
        sampling = Sampling(temperature=0.0, max_tokens=4, prompt_logprobs=0 if scored else None)
        plain = Sampling(temperature=0.0, max_tokens=4)
        got = running.generate([poisoned, healthy, poisoned], 4, [sampling, plain, plain])
        assert [each.finish_reason for each in got] == ["error", "length", "error"]
        (after,) = running.generate([healthy], 4)
        assert got[1].token_ids == after.token_ids == greedy_reference(path, healthy, 4)
        check_dealt(running)
