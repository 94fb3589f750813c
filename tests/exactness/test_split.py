"""Passes that replicas share out among them give the tokens of `transformers` in fp32, whole engine in one process."""

import random

import pytest

from coordinator.plan import DecodeMode, Sampling
from cp_layout.laws import legal_shapes
from cp_wire.pb import common_pb2
from tests.inproc import Shape, cluster
from tests.tiny_models import greedy_reference

B = 4
SPLIT = frozenset({DecodeMode.REPLICATED, DecodeMode.SPLIT})
EIGHT = {"heads": 8, "kv_heads": 2}
SIX = {"heads": 6, "kv_heads": 3, "hidden": 48, "ffn": 100}
NAMED = [
    # (tp, pcp, dcp), model; q‖k‖v, FFN and vocabulary are cut at odd places
    ((1, 2, 2), EIGHT),
    ((1, 3, 3), EIGHT | {"ffn": 101, "vocab": 331}),
    ((1, 4, 4), EIGHT | {"tie": True}),
    ((2, 2, 2), EIGHT | {"ffn": 101, "vocab": 323}),
    ((2, 2, 4), {"heads": 8, "kv_heads": 1}),
    ((3, 2, 2), SIX),
    ((1, 2, 1), EIGHT | {"ffn": 99, "vocab": 321, "tie": True}),
    ((2, 2, 1), EIGHT),
    ((1, 3, 1), SIX),
]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def prompt_of(length: int, vocab: int = 320) -> list[int]:
    return [random.Random(length * 100 + i).randrange(vocab) for i in range(length)]


def layers_of(model: dict) -> int:
    return model.get("layers", 2)


def check(path, shape: Shape, lengths: list[int], new_tokens: int, layers: int = 2) -> None:
    """One request after the other, so that all decode steps are split."""
    with cluster(path, shape) as running:
        for length in lengths:
            prompt = prompt_of(length)
            (got,) = running.generate([prompt], new_tokens)
            assert got.token_ids == greedy_reference(path, prompt, new_tokens), (shape, length)
        decoding = [
            (step, results)
            for step, results in zip(running.steps, running.results, strict=True)
            if step.rows and step.rows[0].output_index > 0
        ]
        assert len(decoding) == len(lengths) * (new_tokens - 1)
        collectives = _collectives(shape, layers)
        for step, results in decoding:
            assert step.decode_mode is DecodeMode.SPLIT
            assert [result.collectives for result in results] == [collectives] * len(results)
        assert all(free == shape.blocks for free in running.scheduler.free_blocks)


def _collectives(shape: Shape, layers: int) -> int:
    """Per layer a gather of [q‖k‖v], two sums, the merge and, with d > 1, the gather of Q; the embedding's and the head's."""
    d = 1 if shape.dcp == 1 else shape.dcp // shape.pcp
    merge = 0 if shape.dcp == 1 else {"a2a": 1, "ag_rs": 2}[shape.merge]
    return layers * (3 + merge + (d > 1)) + (shape.tp > 1) + 1


@pytest.mark.parametrize("merge", ["a2a", "ag_rs"])
@pytest.mark.parametrize(("grid", "model"), NAMED, ids=str)
def test_named_shapes(tiny, grid, model, merge):
    tp, pcp, dcp = grid
    shape = Shape(tp=tp, pcp=pcp, dcp=dcp, interleave=2, block_size=B, merge=merge, ways=SPLIT)
    check(tiny(**model), shape, [1, 2, B * dcp - 1, 37], new_tokens=6)


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 3, 3), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(tiny, family, grid):
    """Biases go with the rows they belong to; heads are normed when they are whole again."""
    tp, pcp, dcp = grid
    check(tiny(family=family), Shape(tp=tp, pcp=pcp, dcp=dcp, block_size=B, ways=SPLIT), [3, 21], new_tokens=6)


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("model", [EIGHT, SIX, {"heads": 8, "kv_heads": 8}, {"heads": 8, "kv_heads": 1}], ids=str)
def test_every_legal_shape(tiny, model, family):
    for tp, pcp, dcp in legal_shapes(8, model["heads"], model["kv_heads"]):
        if pcp > 1:
            shape = Shape(tp=tp, pcp=pcp, dcp=dcp, interleave=1, block_size=B, ways=SPLIT)
            check(tiny(family=family, **model), shape, [1, 2 * dcp + 1], new_tokens=4)


def test_several_rows_below_the_number_of_replicas(tiny):
    path, shape = tiny(**EIGHT), Shape(pcp=4, dcp=4, block_size=B, ways=SPLIT)
    prompts = [prompt_of(n) for n in (5, 9, 2)]
    with cluster(path, shape) as running:
        for prompt, got in zip(prompts, running.generate(prompts, 6), strict=True):
            assert got.token_ids == greedy_reference(path, prompt, 6)
        assert {len(step.rows) for step in running.steps if step.decode_mode is DecodeMode.SPLIT} == {3}


@pytest.mark.parametrize("grid", [(1, 2, 2), (2, 2, 1)], ids=str)
def test_draws_and_penalties_do_not_depend_on_the_way(tiny, grid):
    """The first replica's TP member 0 draws alone, with the history it kept all along."""
    path, prompt = tiny(**EIGHT), prompt_of(9)
    sampling = Sampling(temperature=1.0, seed=5, max_tokens=8, repetition_penalty=1.3, logprobs=True, top_logprobs=2)

    def tokens(shape: Shape) -> tuple[list[int], list[float]]:
        with cluster(path, shape) as running:
            (got,) = running.generate([prompt], 8, [sampling])
            return got.token_ids, got.logprobs

    tp, pcp, dcp = grid
    alone, alone_logprobs = tokens(Shape(block_size=B))
    split, split_logprobs = tokens(Shape(tp=tp, pcp=pcp, dcp=dcp, block_size=B, ways=SPLIT))
    assert split == alone
    assert split_logprobs == pytest.approx(alone_logprobs, abs=1e-4)


def test_bfloat16_parts_are_near_the_whole(tiny):
    """Packed matrices: logprobs of the same tokens, split and not."""
    path, prompt = tiny(**EIGHT), prompt_of(30)
    bias = tuple((token, 100.0) for token in (7,))
    sampling = Sampling(temperature=0.0, max_tokens=5, logprobs=True, logit_bias=bias)

    def logprobs(ways: frozenset[DecodeMode]) -> list[float]:
        with cluster(path, Shape(pcp=2, dcp=2, block_size=B, dtype="bfloat16", kv_dtype="bfloat16", ways=ways)) as running:
            (got,) = running.generate([prompt], 5, [sampling])
            assert got.token_ids == [7] * 5
            return got.logprobs

    assert logprobs(SPLIT) == pytest.approx(logprobs(frozenset({DecodeMode.REPLICATED})), abs=0.3)


def test_the_plan_names_the_way(tiny):
    with cluster(tiny(**EIGHT), Shape(pcp=2, dcp=2, block_size=B, ways=SPLIT)) as running:
        running.generate([prompt_of(3)], 3)
        modes = [plan.decode_mode for plan in running.plans if plan.rows]
    assert modes == [common_pb2.DECODE_MODE_REPLICATED, common_pb2.DECODE_MODE_SPLIT, common_pb2.DECODE_MODE_SPLIT]


@pytest.mark.parametrize("grid", [(1, 2, 1), (1, 2, 2), (2, 2, 2)], ids=str)
def test_rows_are_dealt_out_and_split_in_turn(tiny, grid):
    """A prompt is dealt out, its lone decode steps are split; two requests decode on their owners; then one is left."""
    path, (tp, pcp, dcp) = tiny(**EIGHT), grid
    ways = SPLIT | {DecodeMode.OWNER}
    prompts, tokens = [prompt_of(9), prompt_of(14)], [5, 9]
    with cluster(path, Shape(tp=tp, pcp=pcp, dcp=dcp, block_size=B, ways=ways)) as running:
        for _ in range(2):
            for prompt, count, got in zip(prompts, tokens, running.generate(prompts, tokens), strict=True):
                assert got.token_ids == greedy_reference(path, prompt, count)
            (alone,) = running.generate([prompt_of(11)], 4)
            assert alone.token_ids == greedy_reference(path, prompt_of(11), 4)
        assert {step.decode_mode for step in running.steps if step.rows} == {DecodeMode.OWNER, DecodeMode.SPLIT}
