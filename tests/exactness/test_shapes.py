"""Every legal shape gives the tokens of `transformers` in fp32, whole engine in one process."""

import itertools
import random

import pytest

from cp_layout.laws import legal_shapes
from tests.exactness.turns import merges_in_turn
from tests.inproc import Shape, cluster
from tests.tiny_models import greedy_reference

B = 4
NAMED = [
    # (tp, pcp, dcp), model
    ((4, 1, 2), {"heads": 8, "kv_heads": 2}),
    ((8, 1, 4), {"heads": 8, "kv_heads": 2}),
    ((8, 1, 8), {"heads": 8, "kv_heads": 1}),
    ((6, 1, 2), {"heads": 6, "kv_heads": 3, "hidden": 48, "ffn": 100}),
    ((4, 2, 4), {"heads": 8, "kv_heads": 2}),
    ((2, 2, 2), {"heads": 8, "kv_heads": 8}),
]
MODELS = [
    {"heads": 8, "kv_heads": 1},
    {"heads": 8, "kv_heads": 2},
    {"heads": 8, "kv_heads": 4},
    {"heads": 8, "kv_heads": 8},
    {"heads": 6, "kv_heads": 3, "hidden": 48, "ffn": 100},
    {"heads": 6, "kv_heads": 1, "hidden": 48, "ffn": 100, "tie": True},
]


def prompts_for(virtual_block: int, vocab: int, seed: int) -> list[list[int]]:
    """Prompts around every edge: 1, 2, 3, B−1, B, B+1, V−1, V, V+1, and 10 V."""
    rng = random.Random(seed)
    lengths = sorted({1, 2, 3, B - 1, B, B + 1, virtual_block - 1, virtual_block, virtual_block + 1, 10 * virtual_block})
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths if length > 0]


def check(model, shape: Shape, prompts: list[list[int]], new_tokens: int) -> None:
    with cluster(model, shape) as running:
        got = running.generate(prompts, new_tokens)
        for prompt, generation in zip(prompts, got, strict=True):
            assert generation.token_ids == greedy_reference(model, prompt, new_tokens), (shape, len(prompt))
        assert all(free == shape.blocks for free in running.scheduler.free_blocks)


@pytest.mark.parametrize(
    ("grid", "model", "interleave", "merge"),
    merges_in_turn((grid, model, interleave) for grid, model in NAMED for interleave in (1, 2, B)),
    ids=str,
)
def test_named_shapes(tiny, grid, model, interleave, merge):
    path = tiny(**model)
    tp, pcp, dcp = grid
    shape = Shape(tp=tp, pcp=pcp, dcp=dcp, interleave=interleave, block_size=B, merge=merge, budget=16)
    check(path, shape, prompts_for(B * dcp, 200, seed=dcp), new_tokens=6)


def all_cases() -> list[tuple]:
    """Every model, grid and interleave; merges take turns, so that every grid whose cache is sharded has both."""
    cases: list[tuple] = []
    for model in MODELS:
        for grid in legal_shapes(8, model["heads"], model["kv_heads"]):
            for interleave in (1, 2, B) if grid[2] > 1 else (B,):
                cases.append((model, grid, interleave))
    return merges_in_turn(cases, lambda case: case[1])


SAMPLED = random.Random(7).sample(all_cases(), 16)


@pytest.mark.parametrize(("model", "grid", "interleave", "merge"), SAMPLED, ids=str)
def test_legal_shapes_sampled(tiny, model, grid, interleave, merge):
    _legal_shape(tiny, model, grid, interleave, merge)


@pytest.mark.sweep
@pytest.mark.parametrize(("model", "grid", "interleave", "merge"), all_cases(), ids=str)
def test_every_legal_shape(tiny, model, grid, interleave, merge):
    _legal_shape(tiny, model, grid, interleave, merge)


def _legal_shape(tiny, model, grid, interleave, merge):
    tp, pcp, dcp = grid
    shape = Shape(tp=tp, pcp=pcp, dcp=dcp, interleave=interleave, block_size=B, merge=merge, budget=16)
    check(tiny(**model), shape, prompts_for(B * dcp, 200, seed=tp + dcp), new_tokens=5)


def test_world_of_each_sampled_shape_is_small():
    assert all(tp * pcp <= 8 for _, (tp, pcp, _), *_ in all_cases())
    assert len({grid for _, grid, *_ in all_cases()}) >= 15


@pytest.mark.parametrize(("dcp", "interleave"), list(itertools.product((2, 4), (1, B))))
def test_b1_empty_shards_fill_one_by_one(tiny, dcp, interleave):
    """A 1-token prompt decodes across the edges where shards 1, 2, 3 get their first token."""
    path = tiny(heads=8, kv_heads=1)
    shape = Shape(tp=dcp, dcp=dcp, interleave=interleave, block_size=B)
    prompts = [[5], [9, 4, 1], [7] * 100]
    check(path, shape, prompts, new_tokens=3 * B + 6)
