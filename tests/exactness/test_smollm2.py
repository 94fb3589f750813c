"""The default model, whole engine in process, against `transformers` in fp32."""

import pytest

from coordinator.plan import Sampling
from cp_client.default_model import default_model_path
from tests import smollm2_reference
from tests.inproc import Shape, cluster

CASES = [
    Shape(tp=1, dtype="float32", block_size=16, interleave=16, blocks=128, budget=256),
    Shape(tp=3, dtype="float32", block_size=16, interleave=16, blocks=128, budget=256),
    Shape(pcp=2, dcp=1, dtype="float32", block_size=16, interleave=16, blocks=128, budget=256),
    *(
        Shape(pcp=n, dcp=n, dtype="float32", block_size=16, interleave=i, blocks=128, budget=256)
        for n in (2, 4)
        for i in (1, 4, 16)
    ),
]
QUICK = [CASES[1]]
"""The shape of `tests/cluster` gives the same tokens there, from real processes: it need not run twice."""


def check(shape: Shape, prompts: int) -> None:
    reference = smollm2_reference.load()[-prompts:]
    sampling = Sampling(temperature=0.0, max_tokens=smollm2_reference.NEW_TOKENS, top_logprobs=smollm2_reference.TOP)
    with cluster(default_model_path(), shape) as running:
        got = running.generate([case["prompt_ids"] for case in reference], 0, [sampling] * len(reference))
        logprobs: dict[int, list] = {}
        for results in running.results:
            for token in (token for result in results for token in result.sampled):
                logprobs.setdefault(token.handle, []).append({entry.token_id: entry.logprob for entry in token.logprobs.top})
    for index, (case, generation) in enumerate(zip(reference, got, strict=True)):
        assert generation.token_ids == case["output_ids"], case["prompt"][:40]
        for expected, actual in zip(case["top_logprobs"], logprobs[index + 1], strict=True):
            smollm2_reference.assert_close(expected, actual)


@pytest.mark.parametrize("shape", QUICK, ids=lambda s: f"tp{s.tp}-pcp{s.pcp}-dcp{s.dcp}-i{s.interleave}")
def test_smollm2_two_prompts(shape):
    check(shape, prompts=2)


@pytest.mark.sweep
@pytest.mark.parametrize("shape", CASES, ids=lambda s: f"tp{s.tp}-pcp{s.pcp}-dcp{s.dcp}-i{s.interleave}")
def test_smollm2_every_shape(shape):
    check(shape, prompts=len(smollm2_reference.PROMPTS))


@pytest.mark.sweep
def test_committed_reference_is_what_transformers_says():
    committed = smollm2_reference.load()
    for old, new in zip(committed, smollm2_reference.compute(default_model_path()), strict=True):
        assert old["prompt_ids"] == new["prompt_ids"]
        assert old["output_ids"] == new["output_ids"]
        for before, after in zip(old["top_logprobs"], new["top_logprobs"], strict=True):
            assert [p for _, p in before] == pytest.approx([p for _, p in after], abs=1e-4)
