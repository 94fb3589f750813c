"""The compiled programs of a CPU under the whole engine: batches of bf16 requests, each against `transformers` in fp32.

Every width of the model is one that the programs take, and whatever stands in for them elsewhere is forbidden. Outputs are
forced, so that all positions can be compared: by the log-probabilities of the prompts' tokens and of the outputs'.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from coordinator.plan import DecodeMode, Gather, Sampling
from rank_server.attention import cpu, merge, merge_program
from rank_server.attention.cpu_decode import CpuDecode
from rank_server.attention.cpu_prefill import CpuPrefill
from rank_server.compiled import avx512, sums
from rank_server.compiled.slots import RowStore
from rank_server.models import compiled_linear
from rank_server.models.compiled_operations import CompiledOperations
from rank_server.models.linear import DenseGated, DenseLinear
from rank_server.models.operations import TorchOperations
from tests.exactness.pcp import prompt_of
from tests.inproc import Shape, cluster
from tests.tiny_models import logits_reference

pytestmark = pytest.mark.skipif(not avx512.available(), reason="this processor multiplies no bf16 numbers in vectors")

MODEL = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 128}
LENGTHS = (1, 9, 37, 210)
NEW_TOKENS = 6
DEVIATION, LARGEST = 0.1, 0.6
"""Bounds of the errors of a request's log-probabilities: root of the mean square, largest."""
STANDING_IN = (
    (cpu, "paged_partial"),
    (cpu, "dense_partial"),
    (merge, "shares"),
    (TorchOperations, "rms_norm"),
    (TorchOperations, "turn"),
    (DenseLinear, "__call__"),
    (DenseGated, "__call__"),
)
PROGRAMS = {
    "few": (CpuDecode, "attend"),
    "many": (CpuPrefill, "attend_paged"),
    "at hand": (CpuPrefill, "attend_dense"),
    "merge": (merge_program, "merge"),
    "merge packed": (merge_program, "merge_packed"),
    "norm": (CompiledOperations, "rms_norm"),
    "turn": (CompiledOperations, "turn"),
    "store": (RowStore, "__call__"),
    "sum": (sums, "total"),
}
ALWAYS = {"few", "norm", "turn", "store", "product of few rows"}

ONE = Shape(dtype="bfloat16", kv_dtype="bfloat16", blocks=96, budget=110)
TWO = replace(ONE, pcp=2, dcp=2)
SPLIT, OWNER = (frozenset({DecodeMode.REPLICATED, each}) for each in (DecodeMode.SPLIT, DecodeMode.OWNER))
CASES = {
    "one rank": (ONE, {"REPLICATED"}, {"many", "product of many rows"}),
    "split": (replace(TWO, ways=SPLIT), {"REPLICATED", "SPLIT"}, {"many", "product of many rows", "merge packed", "sum"}),
    "owner, keys travel": (
        replace(TWO, ways=OWNER, pcp_gather=Gather.KV),
        {"REPLICATED", "OWNER"},
        {"at hand", "merge", "merge packed"},
    ),
    "owner, queries travel": (
        replace(TWO, ways=OWNER, pcp_gather=Gather.Q),
        {"REPLICATED", "OWNER"},
        {"many", "merge packed"},
    ),
    "tp 2": (replace(TWO, tp=2, interleave=1), {"OWNER", "SPLIT"}, {"merge packed", "sum"}),
}
"""Cluster, how its steps are computed, and the programs that it takes beside those which all take."""


@pytest.fixture
def called(monkeypatch):
    """Names of the programs that have been called; whatever would stand in for one fails."""
    names = set()

    def forbidden(*arguments, **options):
        raise AssertionError("not compiled")

    def watch(name, owner, function):
        real = getattr(owner, function)

        def call(*arguments, **options):
            names.add(name)
            return real(*arguments, **options)

        monkeypatch.setattr(owner, function, call)

    for owner, function in STANDING_IN:
        monkeypatch.setattr(owner, function, forbidden)
    monkeypatch.setattr(compiled_linear, "functional", SimpleNamespace(linear=forbidden))
    for name, (owner, function) in PROGRAMS.items():
        watch(name, owner, function)
    product = compiled_linear.Programs.__call__

    def multiply(programs, x, matrix, other):
        names.add(f"product of {'few' if len(x) <= compiled_linear.FEW_ROWS else 'many'} rows")
        return product(programs, x, matrix, other)

    monkeypatch.setattr(compiled_linear.Programs, "__call__", multiply)
    return names


def sampling(number, max_tokens, prompt_logprobs):
    """Forces a token of its own on each request."""
    bias = ((7 + number, 100.0),)
    return Sampling(0.0, max_tokens=max_tokens, logprobs=True, prompt_logprobs=prompt_logprobs, logit_bias=bias)


def check(path, tokens, found):
    """found: log-probabilities of the last tokens, each after those before it. NaN, of a foreign slot, is within no bound."""
    logits = logits_reference(path, tokens[:-1])[-len(found) :]
    error = torch.tensor(found) - logits.log_softmax(-1).gather(1, torch.tensor(tokens[-len(found) :])[:, None])[:, 0]
    assert error.square().mean().sqrt() < DEVIATION and error.abs().max() < LARGEST


@pytest.mark.parametrize("name", CASES)
def test_batches_are_near_the_reference(tiny, called, name):
    """Chunks beside decode rows; in the end the longest request is alone. The second time prompts are cached."""
    path, (shape, modes, programs) = tiny(**MODEL), CASES[name]
    prompts = [prompt_of(length) for length in LENGTHS]
    limits = [NEW_TOKENS * (2 if length == max(LENGTHS) else 1) for length in LENGTHS]
    with cluster(path, shape) as running:
        first, second = (
            running.generate(prompts, limits, [sampling(i, limit, scored) for i, limit in enumerate(limits)])
            for scored in (0, None)
        )
    for i, (prompt, limit, got, again) in enumerate(zip(prompts, limits, first, second, strict=True)):
        assert got.token_ids == again.token_ids == [7 + i] * limit
        assert again.num_cached_tokens >= len(prompt) - 10
        tokens = [*prompt, *got.token_ids]
        check(path, tokens, [got.prompt_logprobs[position].sampled for position in range(1, len(prompt))] + got.logprobs)
        check(path, tokens, again.logprobs)
    assert {step.decode_mode.name for step in running.steps if step.rows} == modes
    assert called >= ALWAYS | programs
