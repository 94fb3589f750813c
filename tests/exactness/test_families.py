"""Every family and every kind of rotary positions through the whole engine: the tokens of `transformers` in fp32."""

import pytest

from cp_layout.laws import legal_shapes
from model_files.families import FAMILIES
from tests.exactness.test_shapes import B, check, prompts_for
from tests.inproc import Shape

NAMES = [family.model_type for family in FAMILIES.values()]
GRIDS = [
    # (tp, pcp, dcp), KV heads, interleave
    ((1, 1, 1), 2, B),
    ((2, 1, 2), 1, 1),
    ((2, 1, 2), 1, B),
    ((4, 1, 2), 2, 1),
    ((4, 1, 2), 2, B),
    ((1, 2, 2), 2, 1),
    ((1, 2, 2), 2, B),
    ((2, 2, 4), 1, 2),
]
ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
}


@pytest.mark.parametrize(("grid", "kv_heads", "interleave"), GRIDS, ids=str)
@pytest.mark.parametrize("family", NAMES)
def test_tokens_of_every_family(tiny, family, grid, kv_heads, interleave):
    tp, pcp, dcp = grid
    model = tiny(family=family, kv_heads=kv_heads, head_dim=12, tie=family == "qwen3")
    shape = Shape(tp=tp, pcp=pcp, dcp=dcp, interleave=interleave, block_size=B, budget=16)
    check(model, shape, prompts_for(B * dcp, 300, seed=dcp), new_tokens=6)


SWEEP = [
    (family, kv_heads, grid)
    for family in NAMES
    for kv_heads in (1, 2, 4)
    for grid in legal_shapes(8, num_heads=8, num_kv_heads=kv_heads)
]


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "kv_heads", "grid"), SWEEP, ids=str)
def test_every_legal_shape_of_every_family(tiny, family, kv_heads, grid):
    tp, pcp, dcp = grid
    model = tiny(family=family, kv_heads=kv_heads, head_dim=12, ffn=101, vocab=331)
    shape = Shape(tp=tp, pcp=pcp, dcp=dcp, interleave=2, block_size=B, budget=16)
    check(model, shape, prompts_for(B * dcp, 300, seed=tp + dcp), new_tokens=5)


@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 2), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tokens_beyond_the_original_context(tiny, family, rope, grid):
    """Prompts of up to 9 tokens decode across the 8 positions of the original context, a prompt of 30 begins beyond it."""
    tp, pcp, dcp = grid
    model = tiny(family=family, kv_heads=1, rope=ROPES[rope], max_position=64)
    shape = Shape(tp=tp, pcp=pcp, dcp=dcp, block_size=B, budget=16)
    check(model, shape, [*prompts_for(B * dcp, 300, seed=dcp), list(range(7, 37))], new_tokens=12)
