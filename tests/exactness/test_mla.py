"""Latent attention and experts through the whole engine: the tokens of `transformers` in fp32."""

import pytest

from coordinator.plan import Sampling
from cp_layout.laws import legal_shapes
from tests.exactness.test_shapes import B, check, prompts_for
from tests.exactness.turns import merges_in_turn
from tests.inproc import Shape, cluster
from tests.tiny_models import greedy_reference, logits_reference

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


@pytest.mark.parametrize(("grid", "interleave", "merge"), merges_in_turn(GRIDS), ids=str)
def test_tokens_of_every_kind_of_group(tiny, grid, interleave, merge):
    tp, pcp, dcp = grid
    name = list(MODELS)[(tp + pcp + dcp) % len(MODELS)]
    shape = Shape(tp=tp, pcp=pcp, dcp=dcp, interleave=interleave, block_size=B, merge=merge, budget=16)
    check(tiny(**MODELS[name]), shape, prompts_for(B * dcp, 300, seed=dcp), new_tokens=6)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_of_prompt_and_output(tiny, name, tp):
    """Every position, in chunks, alone and with latents cut over the TP members."""
    path, prompt = tiny(**MODELS[name]), prompts_for(B, 300, seed=4)[-1][:21]
    ids = [*prompt, *greedy_reference(path, prompt, 5)]
    wanted = logits_reference(path, ids).double().log_softmax(-1)
    sampling = Sampling(temperature=0.0, max_tokens=5, logprobs=True, prompt_logprobs=0)
    for dcp in {1, tp}:
        with cluster(path, Shape(tp=tp, dcp=dcp, block_size=B, budget=8)) as running:
            (got,) = running.generate([prompt], 5, [sampling])
        assert [*prompt, *got.token_ids] == ids
        scores = {position: each.sampled for position, each in got.prompt_logprobs.items()}
        assert scores == pytest.approx({i: float(wanted[i - 1, ids[i]]) for i in range(1, len(prompt))}, abs=1e-3)
        assert got.logprobs == pytest.approx([float(wanted[i - 1, ids[i]]) for i in range(len(prompt), len(ids))], abs=1e-3)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("interleave", [1, B])
@pytest.mark.parametrize("grid", [(1, 1, 1), (4, 1, 1), (4, 1, 2), (1, 2, 2), (2, 2, 4), (1, 2, 1)], ids=str)
def test_a_dcp_group_stores_one_latent_per_token_and_layer(tiny, grid, interleave, dtype, size):
    """Pools begin full of NaN: what is a number was written."""
    tp, pcp, dcp = grid
    shape = Shape(tp=tp, pcp=pcp, dcp=dcp, interleave=interleave, block_size=B, kv_dtype=dtype, max_ahead=0)
    with cluster(tiny(**MODELS["v3"]), shape) as running:
        running.submit(list(range(11)), Sampling(temperature=0.0, max_tokens=9))
        for _ in range(3):
            running.step()
        for group in running.grid.dcp_groups():
            pools = [running.executors[rank].pool for rank in group]
            written = sum(int((~pool._data.isnan()).sum()) * pool._data.itemsize for pool in pools)
            assert written == (11 + 2) * (16 + 4) * size * 2
            assert {pool.bytes_per_block for pool in pools} == {2 * B * (16 + 4) * size}


def all_cases() -> list[tuple]:
    """Every model, grid and interleave; merges take turns, so that every grid has both with each model and each interleave."""
    grids = list(legal_shapes(8, 8, 1, mla=True))
    shapes = [(grid, interleave) for grid in grids for interleave in ((1, 2, B) if grid[2] > 1 else (B,))]
    return merges_in_turn([(name, *shape) for name in MODELS for shape in shapes], lambda case: case[1])


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "grid", "interleave", "merge"), all_cases(), ids=str)
def test_every_legal_shape(tiny, name, grid, interleave, merge):
    tp, pcp, dcp = grid
    shape = Shape(tp=tp, pcp=pcp, dcp=dcp, interleave=interleave, block_size=B, merge=merge, budget=16)
    check(tiny(**MODELS[name]), shape, prompts_for(B * dcp, 300, seed=tp + dcp), new_tokens=5)
