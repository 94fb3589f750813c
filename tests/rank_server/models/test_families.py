"""Every family against `transformers` in fp32, over every kind of tensor-parallel cut."""

import pytest
import torch

from model_files import open_model
from model_files.families import FAMILIES
from rank_server.collectives.solo import SoloGroup
from rank_server.models.decoder import DecoderModel
from rank_server.models.table import build_model, load_weights, resident_weights
from tests.devices import CPU
from tests.rank_server.models.tensor_parallel import DenseAttention, on_members, whole_prompt
from tests.rank_server.models.test_decoder import TOLERANCE, alone, prompt_of
from tests.tiny_models import greedy_reference, logits_reference

NAMES = [family.model_type for family in FAMILIES.values()]
SIX_HEADS = {"hidden": 48, "heads": 6, "ffn": 100, "vocab": 323}
CUTS = [
    # KV heads cut, then shared; FFN 101 and vocabulary 331 divide by nothing
    ({"heads": 8, "kv_heads": 2, "ffn": 101, "vocab": 331}, [1, 2, 4, 8]),
    ({"heads": 8, "kv_heads": 4, "head_dim": 12, "tie": True}, [1, 4, 8]),
    (SIX_HEADS | {"kv_heads": 3, "head_dim": 10}, [1, 3, 6]),
    (SIX_HEADS | {"kv_heads": 1, "tie": True}, [2, 3, 6]),
]
CASES = [(family, model, tp) for family in NAMES for model, sizes in CUTS for tp in sizes]


def label(case: object) -> str:
    if isinstance(case, dict):
        return "-".join(f"{k}{v}" for k, v in case.items())
    return case if isinstance(case, str) else f"tp{case}"


@pytest.mark.parametrize(("family", "model", "tp"), CASES, ids=label)
def test_logits_equal_transformers(tiny, family, model, tp):
    path, ids = tiny(family=family, **model), prompt_of(29)
    expected = logits_reference(path, ids)
    got = on_members(path, tp, lambda decoder, group: (whole_prompt(decoder, ids), group.calls))
    logits, _ = got[0]
    assert logits.shape == expected.shape
    assert float((logits - expected).abs().max()) <= TOLERANCE
    assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()
    assert all(torch.equal(others, logits) for others, _ in got[1:])
    assert {calls for _, calls in got} == {0 if tp == 1 else 2 * 2 + 2}, "a family costs no further collective"


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("family", NAMES)
def test_greedy_ids_equal_transformers_in_chunks_and_decode(tiny, family, tp):
    path, prompt = tiny(family=family), prompt_of(21)

    def generate(decoder: DecoderModel, group: object) -> list[int]:
        attend, output, start = DenseAttention(), [], 0
        fed = [prompt[:8], prompt[8:20], prompt[20:]]
        while len(output) < 12:
            ids = fed.pop(0)
            hidden = decoder.forward(torch.tensor(ids), torch.arange(start, start + len(ids)), attend)
            start += len(ids)
            if not fed:
                output.append(int(decoder.logits(hidden[-1:]).argmax()))
                fed.append(output[-1:])
        return output

    assert on_members(path, tp, generate) == [greedy_reference(path, prompt, 12)] * tp


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "tensor", "change"),
    [
        ("qwen2", "qkv_proj.bias", torch.zeros_like),
        # 8 query heads of 8, then 2 key and 2 value heads: exchange the biases of the two key heads, then of the value heads
        ("qwen2", "qkv_proj.bias", lambda bias: torch.cat((bias[:64], bias[72:80], bias[64:72], bias[80:]))),
        ("qwen2", "qkv_proj.bias", lambda bias: torch.cat((bias[:80], bias[88:], bias[80:88]))),
        ("qwen3", "q_norm.weight", torch.ones_like),
        ("qwen3", "k_norm.weight", torch.ones_like),
        ("qwen3", "q_norm.weight", lambda weight: weight.roll(1)),
    ],
    ids=["no bias", "keys swapped", "values swapped", "q not scaled", "k not scaled", "q scaled in another order"],
)
def test_the_oracle_notices_a_wrong_bias_or_norm(tiny, family, tensor, change):
    path, ids = tiny(family=family), prompt_of(13)
    files = open_model(path)
    weights = load_weights(files, 1, 0, torch.float32, lambda done, total: None, CPU)
    name = f"model.layers.1.self_attn.{tensor}"
    weights[name] = change(weights[name])
    changed = whole_prompt(build_model(files.shape, resident_weights(files.shape, weights, 1), SoloGroup("tp:0")), ids)
    assert float((changed - logits_reference(path, ids)).abs().max()) > 100 * TOLERANCE


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_low_precision_stays_near_and_answers_in_fp32(tiny, family, dtype):
    path, ids = tiny(family=family), prompt_of(17)
    expected = logits_reference(path, ids)
    logits = whole_prompt(alone(path, dtype), ids)
    assert logits.dtype == torch.float32
    error = float((logits - expected).pow(2).mean().sqrt() / expected.std())
    assert error < {torch.bfloat16: 0.1, torch.float16: 0.01}[dtype]
