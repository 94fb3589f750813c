"""Rows dealt out over replicas give the tokens of `transformers` in fp32, whole engine in one process."""

import itertools
import random

import pytest

from coordinator.choice import computable
from coordinator.plan import Sampling
from cp_layout.laws import legal_shapes
from cp_wire.pb import common_pb2
from tests.exactness.pcp import DEALT, MODEL, B, check_dealt, dealt, gathers, prompt_of
from tests.exactness.turns import merges_in_turn
from tests.inproc import Shape, cluster
from tests.tiny_models import greedy_reference

MODELS = [
    {"heads": 8, "kv_heads": 1},
    {"heads": 8, "kv_heads": 2},
    {"heads": 8, "kv_heads": 8},
    {"heads": 6, "kv_heads": 3, "hidden": 48, "ffn": 100},
]
NAMED = [
    # (tp, pcp, dcp), model
    ((1, 2, 1), MODEL),
    ((2, 2, 1), MODEL),
    ((1, 2, 2), MODEL),
    ((1, 3, 3), MODEL),
    ((1, 4, 4), MODEL),
    ((2, 2, 2), MODEL),
    ((3, 2, 2), {"heads": 6, "kv_heads": 3, "hidden": 48, "ffn": 100}),
    ((4, 2, 4), MODEL),
    ((4, 2, 8), {"heads": 8, "kv_heads": 1}),
]


def check(path, shape: Shape, prompts: list[list[int]], new_tokens: int) -> None:
    with cluster(path, shape) as running:
        for prompt, got in zip(prompts, running.generate(prompts, new_tokens), strict=True):
            assert got.token_ids == greedy_reference(path, prompt, new_tokens), (shape, len(prompt))
        check_dealt(running)
        assert all(free == shape.blocks for free in running.scheduler.free_blocks)


@pytest.mark.parametrize(
    ("grid", "model", "gather"), [(*each, gather) for each in NAMED for gather in gathers(each[0])], ids=str
)
def test_d3_named_shapes_chunked_and_batched(tiny, grid, model, gather):
    """Prompts (3, 8, 5) of D4 and longer ones in chunks beside decode rows, 5 generated tokens each."""
    merge = "ag_rs" if grid[1] == 3 else "a2a"
    shape = dealt(*grid, gather, interleave=2, budget=11, merge=merge)
    check(tiny(**model), shape, [prompt_of(n) for n in (3, 8, 5, 1, 40)], new_tokens=5)


def all_cases() -> list[tuple]:
    """Every model, grid, gather and interleave; merges take turns, so that every grid has both with each gather."""
    cases: list[tuple] = []
    for model in MODELS:
        for grid in legal_shapes(8, model["heads"], model["kv_heads"]):
            if grid[1] > 1:
                for gather, interleave in itertools.product(gathers(grid), (1, 2, B) if grid[2] > 1 else (B,)):
                    cases.append((model, grid, gather, interleave))
    return merges_in_turn(cases, lambda case: case[1:3])


CASE = ("model", "grid", "gather", "interleave", "merge")


@pytest.mark.parametrize(CASE, random.Random(5).sample(all_cases(), 12), ids=str)
def test_legal_shapes_sampled(tiny, model, grid, gather, interleave, merge):
    _legal_shape(tiny(**model), grid, gather, interleave, merge)


@pytest.mark.sweep
@pytest.mark.parametrize(CASE, all_cases(), ids=str)
def test_every_legal_shape(tiny, model, grid, gather, interleave, merge):
    _legal_shape(tiny(**model), grid, gather, interleave, merge)


def _legal_shape(path, grid, gather, interleave, merge):
    v, p = B * grid[2], grid[1]
    lengths = sorted({1, 2 * p - 1, 2 * p, 2 * p + 1, v - 1, v, v + 1, 5 * v} - {0})
    shape = dealt(*grid, gather, interleave=interleave, merge=merge, budget=16, blocks=96)
    check(path, shape, [prompt_of(n) for n in lengths], new_tokens=4)


@pytest.mark.parametrize(("pcp", "gather"), [(2, "kv"), (3, "q")])
def test_d4_every_length_around_the_segments(tiny, pcp, gather):
    _lengths(tiny(**MODEL), pcp, gather, batched=True)


@pytest.mark.sweep
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("gather", ["q", "kv"])
@pytest.mark.parametrize("pcp", [2, 3, 4])
def test_d4_every_length_alone_and_batched(tiny, pcp, gather, batched):
    _lengths(tiny(**MODEL), pcp, gather, batched)


def _lengths(path, pcp, gather, batched):
    prompts = [prompt_of(length) for length in range(1, 4 * pcp + 2)]
    for batch in [prompts] if batched else [[prompt] for prompt in prompts]:
        check(path, dealt(1, pcp, pcp, gather, budget=256), batch, new_tokens=5)


@pytest.mark.parametrize("ways", [DEALT, computable(latent=False)], ids=["replicated", "split"])
@pytest.mark.parametrize(("grid", "gather"), [((1, 2, 1), "kv"), ((1, 2, 2), "q"), ((1, 2, 2), "kv"), ((2, 2, 2), "kv")])
def test_as_the_scheduler_chooses(tiny, grid, gather, ways):
    """Few decode rows are computed by every replica, or by all together; more are dealt out: requests pass between the ways."""
    path = tiny(**MODEL)
    prompts = [prompt_of(n, n) for n in (13, 6, 21)]
    with cluster(path, dealt(*grid, gather, ways=ways, always_owner=False, budget=9)) as running:
        limits = [3, 14, 6]
        for _ in range(2):  # the second time with hits of the prefix cache
            for prompt, limit, got in zip(prompts, limits, running.generate(prompts, limits), strict=True):
                assert got.token_ids == greedy_reference(path, prompt, limit)
        lone = common_pb2.DECODE_MODE_REPLICATED if ways is DEALT else common_pb2.DECODE_MODE_SPLIT
        # Where the cache is not sharded, whoever decoded a request once is the only one who can.
        used = {common_pb2.DECODE_MODE_OWNER, lone} if grid[2] > 1 else {common_pb2.DECODE_MODE_OWNER}
        assert {plan.decode_mode for plan in running.plans if plan.rows} == used


@pytest.mark.parametrize("interleave", [1, B])
@pytest.mark.parametrize(("grid", "gather"), [((1, 2, 2), "q"), ((1, 2, 2), "kv"), ((1, 3, 3), "kv"), ((1, 2, 1), "kv")])
def test_f_prefix_hits_change_nothing(tiny, grid, gather, interleave):
    """A conversation that goes on finds its prompt in the cache, and of the answer what all replicas have."""
    path, v = tiny(**MODEL), B * grid[2]
    with cluster(path, dealt(*grid, gather, interleave=interleave, always_owner=grid[2] > 1)) as running:
        prompt = prompt_of(2 * v + 1)
        for _ in range(3):
            (got,) = running.generate([prompt], 6)
            assert got.token_ids == greedy_reference(path, prompt, 6)
            prompt = [*prompt, *got.token_ids, 5]
        assert got.num_cached_tokens > 0


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize(("grid", "gather"), [((1, 2, 2), "q"), ((1, 2, 2), "kv"), ((2, 2, 2), "kv"), ((1, 2, 1), "kv")])
def test_e2_preemption_changes_nothing(tiny, grid, gather, budget):
    """A request that resumes may have another owner."""
    path = tiny(**MODEL)
    prompts = [prompt_of(length, seed=length) for length in (13, 9, 17, 5, 11)]
    blocks = 8 * 2 // grid[2]
    with cluster(path, dealt(*grid, gather, blocks=blocks, budget=budget)) as running:
        got = running.generate(prompts, 16)
        assert sum(g.num_preemptions for g in got) > 0
        for prompt, generation in zip(prompts, got, strict=True):
            assert generation.token_ids == greedy_reference(path, prompt, 16)
        check_dealt(running)
        assert all(free == blocks for free in running.scheduler.free_blocks)


@pytest.mark.parametrize("after", [0, 1, 2, 4, 6])
@pytest.mark.parametrize("gather", ["q", "kv"])
def test_an_abort_in_any_phase_disturbs_nobody(tiny, gather, after):
    """Waiting, in its first chunk, in a later one, decoding."""
    path = tiny(**MODEL)
    with cluster(path, dealt(1, 2, 2, gather, budget=8)) as running:
        stays = running.submit(prompt_of(9), Sampling(temperature=0.0, max_tokens=12))
        goes = running.submit(prompt_of(20), Sampling(temperature=0.0, max_tokens=12))
        for _ in range(after):
            running.step()
        running.scheduler.abort(goes.handle)
        (got,) = running.finish([stays])
        assert got.token_ids == greedy_reference(path, prompt_of(9), 12)
        assert running.results[-1][0].blocks_in_use == 0
        assert all(free == running.shape.blocks for free in running.scheduler.free_blocks)


def test_d12_one_token_over_four_replicas_a_hundred_times(tiny):
    with cluster(tiny(**MODEL), dealt(1, 4, 4, "kv")) as running:
        for _ in range(100):
            running.generate([[3]], 1)
        check_dealt(running)
