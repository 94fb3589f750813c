"""Latent attention with rows dealt out over replicas: both gathers, chunked prefill, prefix hits, preemption."""

import itertools
import random

import numpy as np
import pytest
import torch

from coordinator.plan import Sampling
from cp_layout.interleave import NOT_MINE
from cp_layout.laws import legal_shapes
from tests.exactness.pcp import B, check_dealt, dealt, gathers, prompt_of
from tests.exactness.test_mla import MODELS
from tests.exactness.turns import merges_in_turn
from tests.inproc import Shape, cluster
from tests.tiny_models import greedy_reference

NAMED = [
    # (tp, pcp, dcp); with pcp = 1 only the gather of KV deals rows out
    (1, 2, 1),
    (2, 2, 1),
    (1, 2, 2),
    (1, 3, 3),
    (1, 4, 4),
    (2, 2, 2),
    (2, 2, 4),
    (4, 2, 4),
    (2, 1, 2),
    (4, 1, 2),
    (4, 1, 4),
]


def check(path, shape: Shape, prompts: list[list[int]], new_tokens: int) -> None:
    with cluster(path, shape) as running:
        for prompt, got in zip(prompts, running.generate(prompts, new_tokens), strict=True):
            assert got.token_ids == greedy_reference(path, prompt, new_tokens), (shape, len(prompt))
        check_dealt(running)
        assert all(free == shape.blocks for free in running.scheduler.free_blocks)


def model_for(tiny, grid):
    return tiny(**MODELS[list(MODELS)[sum(grid) % len(MODELS)]])


@pytest.mark.parametrize(("grid", "gather"), [(grid, gather) for grid in NAMED for gather in gathers(grid)], ids=str)
def test_d3_c1_named_shapes_chunked_and_batched(tiny, grid, gather):
    """Prompts of 1 to 90 tokens in chunks of 11 beside decode rows, through a workspace of a few runs."""
    merge = "ag_rs" if grid[1] == 3 else "a2a"
    shape = dealt(*grid, gather, interleave=2, budget=11, merge=merge, workspace_bytes=2 * grid[2] * 2 * 20 * 4)
    check(model_for(tiny, grid), shape, [prompt_of(n) for n in (3, 8, 5, 1, 90)], new_tokens=5)


@pytest.mark.parametrize("grid", [grid for grid in NAMED if grid[2] > 1], ids=str)
def test_latents_come_to_decode_rows_when_forced(tiny, grid):
    """Every step of the scheduler's own, one decode row included; chunks, and a workspace of a few runs."""
    shape = dealt(*grid, "kv_all", always_owner=False, interleave=2, budget=11, workspace_bytes=2 * grid[2] * 2 * 20 * 4)
    check(model_for(tiny, grid), shape, [prompt_of(n) for n in (3, 8, 1, 40)], new_tokens=5)


def all_cases() -> list[tuple]:
    """Every model, grid, gather and interleave; merges take turns, so that every grid has both with each gather."""
    cases: list[tuple] = []
    for name in MODELS:
        for grid in legal_shapes(8, 8, 1, mla=True):
            if grid[1] > 1 or grid[2] > 1:
                ways = (*gathers(grid), "kv_all") if grid[2] > 1 else gathers(grid)
                for gather, interleave in itertools.product(ways, (1, 2, B) if grid[2] > 1 else (B,)):
                    cases.append((name, grid, gather, interleave))
    return merges_in_turn(cases, lambda case: case[1:3])


CASE = ("name", "grid", "gather", "interleave", "merge")


@pytest.mark.parametrize(CASE, random.Random(6).sample(all_cases(), 16), ids=str)
def test_legal_shapes_sampled(tiny, name, grid, gather, interleave, merge):
    _legal_shape(tiny(**MODELS[name]), grid, gather, interleave, merge)


@pytest.mark.sweep
@pytest.mark.parametrize(CASE, all_cases(), ids=str)
def test_every_legal_shape(tiny, name, grid, gather, interleave, merge):
    _legal_shape(tiny(**MODELS[name]), grid, gather, interleave, merge)


def _legal_shape(path, grid, gather, interleave, merge):
    v, p = B * grid[2], grid[1]
    lengths = sorted({1, 2 * p - 1, 2 * p, 2 * p + 1, v - 1, v, v + 1, 5 * v} - {0})
    shape = dealt(*grid, gather, interleave=interleave, merge=merge, budget=16, blocks=96)
    check(path, shape, [prompt_of(n) for n in lengths], new_tokens=4)


@pytest.mark.parametrize("gather", ["q", "kv"])
@pytest.mark.parametrize("count", [1, 2, 7, 13])
def test_simultaneous_prefills_share_a_prefix(tiny, count, gather):
    _share_a_prefix(tiny(**MODELS["v3"]), (1, 2, 2), count, gather, interleave=2)


@pytest.mark.sweep
@pytest.mark.parametrize("gather", ["q", "kv"])
@pytest.mark.parametrize("interleave", [1, B])
@pytest.mark.parametrize("grid", [(2, 1, 2), (1, 3, 3), (2, 2, 4)], ids=str)
@pytest.mark.parametrize("count", range(1, 14))
def test_any_number_of_simultaneous_prefills_share_a_prefix(tiny, count, grid, interleave, gather):
    _share_a_prefix(model_for(tiny, (*grid, count)), grid, count, gather, interleave)


def _share_a_prefix(path, grid, count, gather, interleave):
    prefix = prompt_of(17, seed=9)
    prompts = [[*prefix, *prompt_of(3 + i % 4, seed=i)] for i in range(count)]
    with cluster(path, dealt(*grid, gather, budget=24, blocks=128, interleave=interleave)) as running:
        for _ in range(2):
            for prompt, got in zip(prompts, running.generate(prompts, 4), strict=True):
                assert got.token_ids == greedy_reference(path, prompt, 4)
        assert got.num_cached_tokens > 0
        check_dealt(running)


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("grid", "gather"), [((1, 2, 2), "q"), ((1, 2, 2), "kv"), ((2, 2, 4), "kv"), ((2, 1, 2), "kv")])
def test_c4_latents_of_another_dtype_are_the_same_on_every_way(tiny, grid, gather, kv_dtype):
    """Three chunks; ids and log-probabilities of one rank with the same cache dtype."""
    path, prompts = tiny(**MODELS["v2-lite"]), [prompt_of(22), prompt_of(7)]
    with cluster(path, Shape(block_size=B, budget=8, kv_dtype=kv_dtype)) as running:
        alone = [got.token_ids for got in running.generate(prompts, 4)]
    with cluster(path, dealt(*grid, gather, budget=8, kv_dtype=kv_dtype)) as running:
        assert [got.token_ids for got in running.generate(prompts, 4)] == alone


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize(("grid", "gather"), [((1, 2, 2), "q"), ((1, 2, 2), "kv"), ((2, 2, 4), "kv"), ((2, 1, 2), "kv")])
def test_e2_preemption_changes_nothing(tiny, grid, gather, budget):
    path = tiny(**MODELS["v3"])
    prompts = [prompt_of(length, seed=length) for length in (13, 9, 17, 5, 11)]
    blocks = 16 // grid[2]
    with cluster(path, dealt(*grid, gather, blocks=blocks, budget=budget)) as running:
        got = running.generate(prompts, 16)
        assert sum(g.num_preemptions for g in got) > 0
        for prompt, generation in zip(prompts, got, strict=True):
            assert generation.token_ids == greedy_reference(path, prompt, 16)
        check_dealt(running)
        assert all(free == blocks for free in running.scheduler.free_blocks)


@pytest.mark.parametrize(("grid", "modes"), [((2, 1, 2), {1, 2}), ((1, 2, 2), {1, 2}), ((2, 2, 4), {1, 2}), ((2, 2, 1), {2})])
def test_as_the_scheduler_chooses(tiny, grid, modes):
    """Latents come to prefill rows; few decode rows are computed by every replica, or by the owner who alone has their KV."""
    path, prompts, limits = tiny(**MODELS["v2"]), [prompt_of(n, n) for n in (13, 6, 21)], [3, 14, 6]
    with cluster(path, dealt(*grid, "kv", always_owner=False, budget=9)) as running:
        for _ in range(2):  # the second time with hits of the prefix cache
            for prompt, limit, got in zip(prompts, limits, running.generate(prompts, limits), strict=True):
                assert got.token_ids == greedy_reference(path, prompt, limit)
        assert {plan.decode_mode for plan in running.plans if plan.rows} == modes


@pytest.mark.parametrize("gather", ["q", "kv", "kv_all"])
@pytest.mark.parametrize("grid", [(1, 2, 2), (2, 2, 4), (2, 2, 2), (1, 3, 3)], ids=str)
def test_chunks_prefix_hits_and_preemption_together(tiny, grid, gather):
    """Rows over replicas and shards, prompts in chunks beside decode rows, prompts in the cache, too few blocks for all."""
    path, blocks, v = model_for(tiny, grid), 24 // grid[2], B * grid[2]
    prefix = prompt_of(v, seed=7)
    prompts = [[*prefix, *prompt_of(length, seed=length)] for length in (13, 9, 17, 5)]
    shape = dealt(*grid, gather, interleave=1 if grid[0] > 1 else B, blocks=blocks, budget=7)
    with cluster(path, shape) as running:
        running.generate([[*prefix, 1]], 1)
        got = running.generate(prompts, 14)
        for prompt, generation in zip(prompts, got, strict=True):
            assert generation.token_ids == greedy_reference(path, prompt, 14)
        assert sum(each.num_preemptions for each in got) > 0
        assert sum(each.num_cached_tokens for each in got) > 0
        mixed = [step for step in running.steps if len({len(row.token_ids) > 1 for row in step.rows}) == 2]
        assert mixed, "no chunk beside decode rows"
        check_dealt(running)
        assert all(free == blocks for free in running.scheduler.free_blocks)


PROMPT = prompt_of(23)


def latents(running, rank: int, handle: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of a request whose slots are on the rank, and their latents [layers, positions, width]."""
    executor = running.executors[rank]
    sequence = executor._sequences.get(handle)
    slots = running.layout.slots(sequence.shard, sequence.block_table.numpy(), np.arange(sequence.num_computed))
    where = np.flatnonzero(slots != NOT_MINE)
    stored = [executor.pool.latents(layer).flatten(0, 1)[slots[where]] for layer in range(2)]
    return torch.from_numpy(where), torch.stack(stored)


@pytest.fixture(scope="module")
def at_once(tiny):
    """Latents of the prompt on one rank."""
    with cluster(tiny(**MODELS["v3"]), Shape(block_size=B)) as running:
        running.submit(PROMPT, Sampling(temperature=0.0, max_tokens=4))
        running.step()
        return latents(running, 0, 1)[1]


@pytest.mark.parametrize("budget", range(1, 10))
@pytest.mark.parametrize("gather", ["q", "kv"])
def test_e_every_budget_leaves_the_same_latents(tiny, at_once, budget, gather):
    grid = random.Random(budget).choice([(2, 1, 2), (1, 2, 2), (1, 3, 3), (2, 2, 4)])
    _budget(tiny(**MODELS["v3"]), at_once, grid, budget, gather, interleave=2)


@pytest.mark.sweep
@pytest.mark.parametrize("budget", range(1, 10))
@pytest.mark.parametrize("interleave", [1, 2, B])
@pytest.mark.parametrize("grid", [(1, 2, 1), (2, 1, 2), (1, 2, 2), (1, 3, 3), (1, 4, 4), (2, 2, 4)], ids=str)
def test_e_every_budget_and_shape_leaves_the_same_latents(tiny, at_once, grid, interleave, budget):
    for gather in gathers(grid):
        _budget(tiny(**MODELS["v3"]), at_once, grid, budget, gather, interleave)


def _budget(path, at_once, grid, budget, gather, interleave):
    with cluster(path, dealt(*grid, gather, interleave=interleave, budget=budget)) as running:
        request = running.submit(PROMPT, Sampling(temperature=0.0, max_tokens=4))
        for _ in range(-(-len(PROMPT) // budget)):
            running.step()
            held: set[int] = set()
            for rank in range(running.grid.world_size):
                where, got = latents(running, rank, request.handle)
                torch.testing.assert_close(got, at_once[:, where], rtol=1e-4, atol=1e-5)
                held |= set(where.tolist())
            assert held == set(range(min(request.num_computed, len(PROMPT))))
        assert request.num_computed == len(PROMPT)
        (got,) = running.finish([request])
        assert got.token_ids == greedy_reference(path, PROMPT, 4)
        check_dealt(running)
