"""Latent attention and experts through the whole engine: the tokens of `transformers` in fp32."""

import pytest

from tests.exactness.test_shapes import B, check, prompts_for
from tests.inproc import Shape

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.7, "mscale_all_dim": 0.8}
MODELS = {
    "v2-lite": {"family": "deepseek_v2"},
    "v2": {"family": "deepseek_v2", "mla": {"q_lora_rank": 24, "topk_method": "group_limited_greedy"}, "rope": YARN},
    "v3": {"family": "deepseek_v3", "mla": {"q_lora_rank": 24}, "rope": YARN},
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_one_rank(tiny, name):
    model = tiny(**MODELS[name])
    shape = Shape(block_size=B, budget=32)
    check(model, shape, prompts_for(B, 300, seed=3), new_tokens=12)


GRIDS = [
    # (tp, pcp, dcp), interleave
    ((2, 1, 1), B),
    ((4, 1, 1), B),
    ((8, 1, 4), 1),
    ((2, 1, 2), 1),
    ((4, 1, 2), 2),
    ((4, 1, 4), B),
    ((1, 2, 2), 1),
    ((1, 3, 3), B),
    ((1, 4, 4), 2),
    ((2, 2, 2), B),
    ((2, 2, 4), 1),
    ((2, 2, 4), B),
    ((4, 2, 4), 2),
]


@pytest.mark.parametrize("merge", ["a2a", "ag_rs"])
@pytest.mark.parametrize(("grid", "interleave"), GRIDS, ids=str)
def test_tokens_of_every_kind_of_group(tiny, grid, interleave, merge):
    tp, pcp, dcp = grid
    name = list(MODELS)[(tp + pcp + dcp) % len(MODELS)]
    shape = Shape(tp=tp, pcp=pcp, dcp=dcp, interleave=interleave, block_size=B, merge=merge, budget=16)
    check(tiny(**MODELS[name]), shape, prompts_for(B * dcp, 300, seed=dcp), new_tokens=6)
