"""Rotary positions against `transformers`: every type, both spellings, positions far beyond the original context."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from model_files import open_model
from model_files.hf_config import shape_from_config
from rank_server.collectives.solo import SoloGroup
from rank_server.models.rotary import Rotary
from rank_server.models.table import build_model, load_weights, resident_weights
from tests.devices import CPU
from tests.rank_server.models.tensor_parallel import on_members, whole_prompt
from tests.rank_server.models.test_decoder import TOLERANCE, prompt_of
from tests.tiny_models import logits_reference

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 8192},
    "llama3 without original": LLAMA3,
    "llama3 narrow": LLAMA3 | {"factor": 32.0, "high_freq_factor": 1.5, "original_max_position_embeddings": 512},
    "yarn": YARN,
    "yarn without original": {"rope_type": "yarn", "factor": 2.5},
    "yarn shrinking": YARN | {"factor": 0.5},
    "yarn factor from the lengths": YARN | {"factor": None},
    "yarn attention factor": YARN | {"attention_factor": 0.7},
    "yarn betas": YARN | {"beta_fast": 8, "beta_slow": 2.5},
    "yarn equal betas": YARN | {"beta_fast": 4.0, "beta_slow": 4.0},
    "yarn untruncated": YARN | {"truncate": False},
    "yarn mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn mscale alone": YARN | {"mscale": 0.5},
    "yarn tiny original": YARN | {"original_max_position_embeddings": 4},
}
BASE = {
    "hidden_size": 1024,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 300,
    "max_position_embeddings": 131072,
    "torch_dtype": "float32",
}
POSITIONS = torch.tensor([0, 1, 17, 8191, 8192, 32768, 131071, 1_000_003])


def spelled(spelling: str, theta: float, scaling: dict[str, Any]) -> dict[str, Any]:
    if spelling == "rope_parameters":
        return {"rope_parameters": scaling | {"rope_theta": theta}}
    if spelling == "rope_scaling with type":
        return {"rope_theta": theta, "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in scaling.items()}}
    return {"rope_theta": theta, "rope_scaling": scaling}


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "rope_scaling with type"])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_cos_and_sin_equal_transformers(tmp_path, name, theta, spelling):
    config = BASE | {"model_type": "llama"} | spelled(spelling, theta, SCALINGS[name])
    (tmp_path / "config.json").write_text(json.dumps(config))
    reference = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    wanted_cos, wanted_sin = reference(torch.zeros(1), POSITIONS[None])
    cos, signed_sin = Rotary(shape_from_config(config, tmp_path, None), CPU).at(POSITIONS, torch.float32)
    half = BASE["head_dim"] // 2
    assert cos.shape == signed_sin.shape == (len(POSITIONS), 1, 2 * half)
    assert torch.equal(cos[:, 0], wanted_cos[0])
    assert torch.equal(signed_sin[:, 0, half:], wanted_sin[0, :, half:])
    assert torch.equal(signed_sin[:, 0, :half], -wanted_sin[0, :, :half])


def test_scalings_differ_from_one_another(tmp_path):
    """None of the cases above is the plain rotation, or another case, by accident."""
    seen = [
        Rotary(shape_from_config(BASE | spelled("rope_parameters", 10000.0, scaling), tmp_path, None), CPU).at(
            POSITIONS, torch.float32
        )[0]
        for scaling in ({"rope_type": "default"}, *SCALINGS.values())
    ]
    same = {(i, j) for i in range(len(seen)) for j in range(i) if torch.equal(seen[i], seen[j])}
    names = ["default", *SCALINGS]
    assert {(names[j], names[i]) for i, j in same} == {
        # the ratio of the two lengths is the factor; a lone mscale has no effect
        ("yarn", "yarn factor from the lengths"),
        ("yarn", "yarn mscale alone"),
        ("yarn factor from the lengths", "yarn mscale alone"),
    }


def test_a_length_beside_the_settings_outranks_the_one_among_them(tmp_path):
    config = BASE | {"model_type": "qwen3", "rope_theta": 1e6, "rope_scaling": YARN}
    config["original_max_position_embeddings"] = 1024
    (tmp_path / "config.json").write_text(json.dumps(config))
    wanted, _ = Qwen3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))(torch.zeros(1), POSITIONS[None])
    cos, _ = Rotary(shape_from_config(config, tmp_path, None), CPU).at(POSITIONS, torch.float32)
    assert torch.equal(cos[:, 0], wanted[0])


TINY = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 16},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.7},
}


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("rope", TINY)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_beyond_the_original_context_equal_transformers(tiny, family, rope, tp):
    path, ids = tiny(family=family, rope=TINY[rope], max_position=64, hidden=128), prompt_of(64)
    expected = logits_reference(path, ids)
    logits = on_members(path, tp, lambda decoder, group: whole_prompt(decoder, ids))[0]
    assert float((logits - expected).abs().max()) <= TOLERANCE
    assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


@torch.inference_mode()
@pytest.mark.parametrize("rope", TINY)
def test_the_oracle_notices_plain_positions(tiny, rope):
    path, ids = tiny(rope=TINY[rope], max_position=64, hidden=128), prompt_of(64)
    plain, files = open_model(tiny(max_position=64, hidden=128)), open_model(path)
    weights = load_weights(files, 1, 0, torch.float32, lambda done, total: None, CPU)
    changed = whole_prompt(build_model(plain.shape, resident_weights(plain.shape, weights, 1), SoloGroup("tp:0")), ids)
    assert float((changed - logits_reference(path, ids)).abs().max()) > 100 * TOLERANCE
