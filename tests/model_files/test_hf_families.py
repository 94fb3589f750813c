"""What config.json of each family says, and what of it is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from cp_layout.model_shape import LinearRope, Llama3Rope, ModelShape, YarnRope
from model_files import ModelRefused, expected_tensors
from model_files.hf_config import shape_from_config
from tests.model_files.tiny_checkpoint import CONFIG

MISTRAL = CONFIG | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
QWEN2 = CONFIG | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "full_attention"],
}
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 12, "attention_bias": False}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}


def shape_of(config: dict[str, Any]) -> ModelShape:
    return shape_from_config(config, Path("m/config.json"), None)


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ModelRefused) as caught:
        shape_of(config)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("config.json") == 1
    return str(caught.value)


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize(
    ("config", "architecture", "qkv_bias", "qk_norm", "head_dim"),
    [
        (CONFIG, "LlamaForCausalLM", False, False, 8),
        (MISTRAL, "MistralForCausalLM", False, False, 8),
        (MISTRAL | {"head_dim": 16}, "MistralForCausalLM", False, False, 16),
        (QWEN2, "Qwen2ForCausalLM", True, False, 8),
        (QWEN2 | {"attention_bias": True}, "Qwen2ForCausalLM", True, False, 8),
        (QWEN3, "Qwen3ForCausalLM", False, True, 12),
    ],
)
def test_what_a_family_adds(config: dict[str, Any], architecture: str, qkv_bias: bool, qk_norm: bool, head_dim: int) -> None:
    shape = shape_of(config)
    assert (shape.architecture, shape.qkv_bias, shape.qk_norm, shape.head_dim) == (architecture, qkv_bias, qk_norm, head_dim)
    assert (shape.num_heads, shape.num_kv_heads, shape.max_position, shape.rope_scaling) == (4, 2, 256, None)


def test_either_name_of_a_family_is_enough() -> None:
    assert shape_of(without(QWEN3, "architectures")).architecture == "Qwen3ForCausalLM"
    assert shape_of(without(MISTRAL, "model_type")).architecture == "MistralForCausalLM"
    assert shape_of(without(CONFIG, "model_type", "architectures")).architecture == "LlamaForCausalLM"


def test_tensors_of_a_bias_and_of_a_head_norm() -> None:
    llama, qwen2, qwen3 = (expected_tensors(shape_of(config)) for config in (CONFIG, QWEN2, QWEN3))
    layer = "model.layers.1.self_attn."
    assert {name: dims for name, dims in qwen2.items() if name not in llama and name.startswith(layer)} == {
        layer + "q_proj.bias": (32,),
        layer + "k_proj.bias": (16,),
        layer + "v_proj.bias": (16,),
    }
    assert {name: dims for name, dims in qwen3.items() if name not in llama and name.startswith(layer)} == {
        layer + "q_norm.weight": (12,),
        layer + "k_norm.weight": (12,),
    }
    assert qwen3[layer + "q_proj.weight"] == (48, 32)
    assert qwen3[layer + "k_proj.weight"] == (24, 32)
    assert qwen3[layer + "o_proj.weight"] == (32, 48)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (MISTRAL | {"sliding_window": 4096}, "sliding_window = 4096 is not supported, only absent or null"),
        (without(MISTRAL, "sliding_window"), "sliding_window is absent, which means 4096 in a MistralForCausalLM model"),
        (MISTRAL | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        (CONFIG | {"sliding_window": 128}, "sliding_window = 128 is not supported"),
        (CONFIG | {"use_sliding_window": True}, "use_sliding_window = True is not supported, only False"),
        (QWEN2 | {"use_sliding_window": True}, "use_sliding_window = True is not supported, only False"),
        (QWEN3 | {"use_sliding_window": True}, "use_sliding_window = True is not supported, only False"),
        (QWEN2 | {"layer_types": ["sliding_attention"]}, "layer_types has 'sliding_attention'"),
        (QWEN3 | {"layer_types": "linear_attention"}, "layer_types has 'linear_attention'"),
        (QWEN2 | {"attention_bias": False}, "attention_bias = False is not supported, only True"),
        (QWEN3 | {"attention_bias": True}, "attention_bias = True is not supported, only False"),
        (MISTRAL | {"mlp_bias": True}, "mlp_bias = True is not supported"),
        (QWEN3 | {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        (QWEN3 | {"num_experts": 8}, "num_experts = 8 is not supported"),
        (QWEN2 | {"quantization_config": {"quant_method": "awq"}}, "quantization_config = {'quant_method': 'awq'}"),
        (CONFIG | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        (CONFIG | {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        (CONFIG | {"attention_chunk_size": 8192}, "attention_chunk_size = 8192 is not supported"),
        (CONFIG | {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        (without(MISTRAL, "num_key_value_heads"), "setting num_key_value_heads is missing"),
        (without(QWEN2, "max_position_embeddings"), "setting max_position_embeddings is missing"),
        (without(QWEN3, "head_dim"), "setting head_dim is missing"),
        (
            QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
            "architecture Qwen3MoeForCausalLM (model_type qwen3_moe) is not supported, "
            "only LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        (QWEN2 | {"model_type": "qwen3"}, "architecture Qwen2ForCausalLM (model_type qwen3) is not supported"),
        (CONFIG | {"architectures": "LlamaForCausalLM"}, "architecture LlamaForCausalLM (model_type llama) is not supported"),
        (without(CONFIG, "architectures") | {"model_type": "gemma2"}, "(model_type gemma2) is not supported"),
    ],
)
def test_a_setting_that_would_be_computed_wrongly_is_refused(config: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(config)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, None),
        ({"type": "linear", "factor": 2}, LinearRope(2.0)),
        (LLAMA3 | {"original_max_position_embeddings": 32}, Llama3Rope(8.0, 32, 1.0, 4.0)),
        (LLAMA3, Llama3Rope(8.0, 256, 1.0, 4.0)),
        (YARN | {"attention_factor": 1.5}, YarnRope(4.0, 64, 32.0, 1.0, 1.5, True)),
        (
            YARN | {"factor": None, "attention_factor": 2, "beta_fast": 16, "beta_slow": 2, "truncate": False},
            YarnRope(4.0, 64, 16.0, 2.0, 2.0, False),
        ),
        (YARN | {"factor": 1, "mscale": None}, YarnRope(1.0, 64, 32.0, 1.0, 1.0, True)),
    ],
)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_rotary_positions_of_every_type_in_both_spellings(name: str, rope: dict[str, Any], expected: object) -> None:
    shape = shape_of(CONFIG | {name: rope})
    assert (shape.rope_theta, shape.rope_scaling) == (5000.0, expected)
    inside = shape_of(CONFIG | {name: rope | {"rope_theta": 77.0}})
    assert (inside.rope_theta, inside.rope_scaling) == (77.0, expected)


def test_the_same_settings_in_both_spellings_are_one() -> None:
    rope = {"rope_type": "linear", "factor": 2.0}
    assert shape_of(CONFIG | {"rope_scaling": rope, "rope_parameters": rope}).rope_scaling == LinearRope(2.0)
    assert shape_of(CONFIG | {"rope_scaling": rope, "rope_parameters": {}}).rope_scaling == LinearRope(2.0)


def test_the_longest_context_is_what_the_configuration_says() -> None:
    """A factor stretches the rotation, not the promise."""
    assert shape_of(CONFIG | {"rope_scaling": YARN}).max_position == 256


@pytest.mark.parametrize(
    ("rope", "sentence"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            "rope_scaling of type 'dynamic' is not supported, only default, linear, llama3",
        ),
        ({"type": "longrope", "factor": 2.0}, "rope_scaling of type 'longrope' is not supported"),
        ({"rope_type": "proportional"}, "rope_scaling of type 'proportional' is not supported"),
        ({"type": "mrope", "mrope_section": [2, 1, 1]}, "rope_scaling of type 'mrope' is not supported"),
        ({"rope_type": ["yarn"]}, "rope_scaling of type ['yarn'] is not supported"),
        ({"rope_type": "default", "factor": 2.0}, "rope_scaling.factor = 2.0 is not supported here"),
        (
            {"full_attention": {"rope_type": "default"}},
            "rope_scaling.full_attention = {'rope_type': 'default'} is not supported",
        ),
        ({"rope_type": "linear"}, "setting rope_scaling.factor is missing"),
        ({"rope_type": "linear", "factor": 0}, "rope_scaling.factor = 0 is not a finite number above 0"),
        ({"rope_type": "linear", "factor": 10**400}, "rope_scaling.factor = 1000"),
        ({"rope_type": "linear", "factor": 2, "mscale": 1}, "rope_scaling.mscale = 1 is not supported here, only"),
        ({"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}, "rope_scaling.partial_rotary_factor = 0.5"),
        (without(LLAMA3, "high_freq_factor"), "setting rope_scaling.high_freq_factor is missing"),
        (LLAMA3 | {"high_freq_factor": 1}, "rope_scaling.high_freq_factor = 1.0 is not above 1.0, the low one"),
        (
            LLAMA3 | {"original_max_position_embeddings": 8.5},
            "rope_scaling.original_max_position_embeddings = 8.5 is not a whole",
        ),
        (YARN | {"attention_factor": -1.0}, "rope_scaling.attention_factor = -1.0 is not a finite number above 0"),
        (YARN | {"mscale": 0, "mscale_all_dim": 1}, "rope_scaling.mscale = 0 is not a finite number above 0"),
        (YARN | {"beta_fast": 0.5}, "rope_scaling.beta_fast = 0.5 is below beta_slow = 1.0"),
        (YARN | {"truncate": 1}, "rope_scaling.truncate = 1 is not true or false"),
        (YARN | {"rope_theta": 1.0}, "rope_theta = 1.0 is not above 1, rotary positions of type 'yarn' need that"),
        (YARN | {"short_factor": [1.0]}, "rope_scaling.short_factor = [1.0] is not supported here"),
    ],
)
def test_rotary_positions_that_would_be_computed_wrongly_are_refused(rope: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(CONFIG | {"rope_scaling": rope})


def test_two_spellings_that_differ_are_refused() -> None:
    rope = {"rope_type": "linear", "factor": 2.0}
    sentence = refusal(CONFIG | {"rope_scaling": rope, "rope_parameters": {"rope_type": "default"}})
    assert "rope_parameters and rope_scaling are both there and differ" in sentence
