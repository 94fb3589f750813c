"""Reference tokens of the default model, from `transformers` in fp32 on the same GGUF file.

`python -m tests.smollm2_reference` writes tests/data/smollm2_reference.json; the sweep recomputes it and compares.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cp_client import Client
from cp_client.events import Event

PATH = Path(__file__).parent / "data" / "smollm2_reference.json"
NEW_TOKENS = 64
TOP = 20

PROMPTS = (
    "The weaver sat down at the loom and",
    "def running_mean(values):\n    total = 0\n",
    "Q: Why do rivers bend?\nA:",
    "Drei Gründe, warum Brücken aus Stahl gebaut werden: 1.",
    "x",
    "Ledger of the harbour office. "
    + " ".join(f"On day {d} the barge number {(d * 37) % 101} brought {(d * 53) % 29 + 2} crates of tea." for d in range(1, 29))
    + " In short, the harbour",
)


def compute(gguf: Path) -> list[dict[str, Any]]:
    """Per prompt: ids, the 64 greedy ids, and per output position the top 20 (id, log-probability) and the runner-up gap."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt).input_ids
        context, cache, output, tops = torch.tensor([ids]), DynamicCache(), [], []
        for _ in range(NEW_TOKENS):
            with torch.inference_mode():
                # Behind input, mask and positions comes the cache, whose name differs between versions.
                result = model(context, None, None, cache, use_cache=True)
            logprobs = torch.log_softmax(result.logits[0, -1].double(), dim=-1)
            top = torch.topk(logprobs, TOP)
            output.append(int(top.indices[0]))
            tops.append([[int(i), round(float(p), 6)] for i, p in zip(top.indices, top.values, strict=True)])
            context = torch.tensor([[output[-1]]])
        cases.append({"prompt": prompt, "prompt_ids": ids, "output_ids": output, "top_logprobs": tops})
    return cases


def load() -> list[dict[str, Any]]:
    """The committed reference."""
    return json.loads(PATH.read_text())


def assert_answers(client: Client) -> list[Event]:
    """A cluster that computes in fp32 gives the reference's tokens and log-probabilities, all prompts at once; returns the last
    event of each."""
    reference = load()
    streams = [
        client.generate(token_ids=case["prompt_ids"], max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, top_logprobs=TOP)
        for case in reference
    ]
    ends = []
    for case, stream in zip(reference, streams, strict=True):
        events = list(stream)
        assert [token for event in events for token in event.token_ids] == case["output_ids"], case["prompt"][:40]
        positions = [position for event in events for position in event.logprobs]
        for expected, actual in zip(case["top_logprobs"], positions, strict=True):
            assert_close(expected, dict(actual.top))
        ends.append(events[-1])
    return ends


def assert_close(expected: Sequence[Sequence[float]], actual: Mapping[int, float], tolerance: float = 1e-3) -> None:
    """Both sides' top candidates of one position agree: same values in order, same value for every id that both name.

    Which of several equally likely candidates comes last among the top is nobody's law: unused token ids share one row.
    """
    assert len(actual) == len(expected) == TOP
    assert sorted((p for _, p in expected), reverse=True) == pytest.approx(sorted(actual.values(), reverse=True), abs=tolerance)
    last = expected[-1][1]
    for token_id, logprob in expected:
        assert actual.get(int(token_id), last) == pytest.approx(logprob, abs=tolerance)


if __name__ == "__main__":
    PATH.write_text(json.dumps(compute(Path(sys.argv[1]))) + "\n")
