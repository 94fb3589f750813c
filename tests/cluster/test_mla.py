"""Latent attention in real processes: one cluster per kind of group, the tokens of `transformers`."""

import random

import pytest

from tests.cluster.processes import kvloom_up
from tests.exactness.test_mla import MODELS
from tests.tiny_models import build_tiny_model, greedy_reference

pytestmark = pytest.mark.cluster

B = 4
KINDS = {
    "tp": ("v2-lite", ["-tp", "2"]),
    "queries over tp members": ("v2", ["-tp", "2", "-dcp", "2", "--mla-gather", "q"]),
    "latents over tp members": ("v3", ["-tp", "2", "-dcp", "2", "--mla-gather", "kv"]),
    "queries over replicas": ("v3", ["-pcp", "2", "-dcp", "2", "--mla-gather", "q"]),
    "latents over replicas": ("v2-lite", ["-pcp", "3", "-dcp", "3", "--mla-gather", "kv", "--dcp-comm-backend", "ag_rs"]),
    "over both": ("v3", ["-tp", "2", "-pcp", "2", "-dcp", "4", "--cp-kv-cache-interleave-size", "1"]),
    "copied to replicas": ("v2", ["-pcp", "2"]),
}


ALWAYS = ("latents over tp members", "queries over replicas")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in ALWAYS else pytest.mark.sweep) for kind in KINDS])
def test_tokens_of_the_oracle(tmp_path, kind):
    name, flags = KINDS[kind]
    path = build_tiny_model(tmp_path / "model", **MODELS[name])
    rng = random.Random(2)
    prompts = [[rng.randrange(200) for _ in range(length)] for length in (1, 3, 2 * B, 61)]
    sizes = ["--block-size", str(B), "--kv-cache-tokens-per-rank", "256", "--max-num-batched-tokens", "24"]
    with kvloom_up(str(path), *flags, *sizes, log=tmp_path / "stderr") as running:
        streams = [running.client.generate(token_ids=p, max_tokens=10, temperature=0.0, ignore_eos=True) for p in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            assert [token for event in stream for token in event.token_ids] == greedy_reference(path, prompt, 10)
        running.wait_for(running.all_blocks_free, 30, "all blocks free")
