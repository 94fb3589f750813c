"""One real cluster per kind of group, small seeded models, the tokens of `transformers`."""

import random

import pytest

from tests.cluster.processes import kvloom_up
from tests.tiny_models import build_tiny_llama, greedy_reference

pytestmark = pytest.mark.cluster

B = 4
KINDS = {
    "tp": (["-tp", "3"], {"heads": 9, "kv_heads": 3, "hidden": 72}),
    "dcp-in-tp": (["-tp", "2", "-dcp", "2"], {"heads": 8, "kv_heads": 1}),
    "dcp-over-tp-and-pcp": (["-tp", "2", "-pcp", "2", "-dcp", "4"], {"heads": 8, "kv_heads": 1}),
    "pcp-without-dcp": (["-pcp", "2"], {"heads": 8, "kv_heads": 2}),
    "over-tcp": (["-tp", "2", "-dcp", "2", "--collectives", "gloo"], {"heads": 8, "kv_heads": 1}),
    "in-shared-memory": (["-tp", "2", "-dcp", "2", "--collectives", "shm"], {"heads": 8, "kv_heads": 1}),
    "dp": (["-dp", "2", "-tp", "1"], {"heads": 8, "kv_heads": 2}),
    "ag_rs": (["-pcp", "2", "-dcp", "2", "--dcp-comm-backend", "ag_rs"], {"heads": 8, "kv_heads": 2}),
    "on-all-addresses": (["-tp", "2", "--host", "0.0.0.0", "--collectives", "gloo"], {"heads": 8, "kv_heads": 2}),
}

ALWAYS = ("tp", "dcp-over-tp-and-pcp", "pcp-without-dcp", "over-tcp", "in-shared-memory", "dp")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in ALWAYS else pytest.mark.sweep) for kind in KINDS])
def test_tokens_of_the_oracle(tmp_path, kind):
    flags, model = KINDS[kind]
    path = build_tiny_llama(tmp_path / "model", **model)
    rng = random.Random(1)
    prompts = [[rng.randrange(200) for _ in range(length)] for length in (1, 3, 2 * B, 37)]
    with kvloom_up(
        str(path), *flags, "--block-size", str(B), "--kv-cache-tokens-per-rank", "256", log=tmp_path / "stderr"
    ) as running:
        streams = [running.client.generate(token_ids=p, max_tokens=10, temperature=0.0, ignore_eos=True) for p in prompts]
        served = set()
        for prompt, stream in zip(prompts, streams, strict=True):
            events = list(stream)
            assert [token for event in events for token in event.token_ids] == greedy_reference(path, prompt, 10)
            served.add(events[-1].route.ranks)
        asked = flags[flags.index("--collectives") + 1] if "--collectives" in flags else "shm"
        assert running.status().config.collectives == asked
        everybody = tuple(rank.rank for rank in running.status().ranks)
        assert served == ({(0,), (1,)} if kind == "dp" else {everybody})
        running.wait_for(running.all_blocks_free, 30, "all blocks free")
