"""Steps that ranks take by themselves bring what single steps bring: the same tokens, plans and log-probabilities."""

import pytest

from coordinator.plan import DecodeMode, Sampling
from cp_wire.pb import rank_pb2
from tests.exactness.test_shapes import B, prompts_for
from tests.inproc import Generation, InprocCluster, Shape, cluster

WAYS = {
    "alone": {},
    "tp": {"tp": 2},
    "q-heads": {"tp": 2, "dcp": 2},
    "split": {"pcp": 2, "dcp": 2, "ways": frozenset({DecodeMode.REPLICATED, DecodeMode.SPLIT})},
    "replicated": {"pcp": 2, "dcp": 2, "ways": frozenset({DecodeMode.REPLICATED})},
    "owner": {"pcp": 2, "dcp": 2, "always_owner": True},
    "owner keeps": {"pcp": 2, "dcp": 1, "always_owner": True},
    "all": {"tp": 2, "pcp": 2, "dcp": 4},
}
LATENT_WAYS = [way for way in WAYS if way != "split"]
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "draws": {"temperature": 1.0, "seed": 7},
    "logprobs": {"temperature": 0.0, "logprobs": True, "top_logprobs": 2},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
}


def run(path, shape: Shape, prompts: list[list[int]], **sampling) -> tuple[list[Generation], InprocCluster]:
    samplings = [Sampling(max_tokens=12 - index, **sampling) for index in range(len(prompts))]
    with cluster(path, shape) as running:
        return running.generate(prompts, 0, samplings), running


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("family", "way"), [*(("llama", way) for way in WAYS), *(("deepseek_v3", way) for way in LATENT_WAYS)])
def test_tokens_are_those_of_single_steps(tiny, family, way, sampling, number):
    path = tiny(heads=8, kv_heads=1) if family == "llama" else tiny(family=family)
    prompts = prompts_for(B, 200, seed=5)[-number:]
    shape = {"block_size": B, "interleave": B, "budget": 32, **WAYS[way]}
    single, slow = run(path, Shape(**shape, max_ahead=0), prompts, **SAMPLINGS[sampling])
    ahead, fast = run(path, Shape(**shape, max_ahead=5), prompts, **SAMPLINGS[sampling])
    assert [each.token_ids for each in ahead] == [each.token_ids for each in single]
    assert [each.logprobs for each in ahead] == [pytest.approx(each.logprobs, abs=1e-5) for each in single]
    assert len({plan.ticket for plan in fast.plans}) < len({plan.ticket for plan in slow.plans}) - 5


@pytest.mark.parametrize("way", ["split", "all"])
def test_the_plan_that_ranks_make_of_a_plan_is_the_schedulers_next_step(tiny, monkeypatch, way):
    """Two makers, one step: every rank computes what the coordinator takes the results for."""
    seen: list[rank_pb2.StepPlan] = []
    with cluster(tiny(heads=8, kv_heads=1), Shape(block_size=B, budget=32, max_ahead=5, **WAYS[way])) as running:
        executor = running.executors[-1]
        step = executor.step

        def keep(plan: rank_pb2.StepPlan, meanwhile) -> rank_pb2.StepResult:
            seen.append(rank_pb2.StepPlan.FromString(plan.SerializeToString()))
            return step(plan, meanwhile)

        monkeypatch.setattr(executor, "step", keep)
        running.generate(prompts_for(B, 200, seed=5)[-1:], 12)
        for plan in [*seen, *running.plans]:
            plan.ahead = 0
        assert len(seen) > len({plan.ticket for plan in seen})
        assert seen == running.plans
