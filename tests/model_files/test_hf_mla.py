"""Latent attention and experts as config.json describes them, and what of it is refused by name."""

import math
from pathlib import Path
from typing import Any

import pytest

from cp_layout.model_shape import MlaShape, ModelShape, MoeShape
from model_files import ModelRefused, expected_tensors, open_model
from model_files.hf_config import shape_from_config

V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
V2 = V2_LITE | {"q_lora_rank": 12, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
V3 = V2 | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale": 0.707, "mscale_all_dim": 0.707}


def shape_of(config: dict[str, Any]) -> ModelShape:
    return shape_from_config(config, Path("m/config.json"), None)


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ModelRefused) as caught:
        shape_of(config)
    assert str(caught.value).startswith("m/config.json: ")
    return str(caught.value)


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def test_the_three_layouts() -> None:
    plain = MlaShape(None, 16, 8, 4, 6)
    assert shape_of(V2_LITE).mla == plain
    assert shape_of(V2_LITE).moe == MoeShape(8, 3, 20, 2, 1, "greedy")
    assert shape_of(V2).mla == MlaShape(12, 16, 8, 4, 6)
    assert shape_of(V2).moe == MoeShape(8, 3, 20, 2, 1, "group_limited_greedy", 4, 2)
    assert shape_of(V3).moe == MoeShape(8, 3, 20, 2, 1, "noaux_tc", 4, 2, True, 2.5)
    assert (shape_of(V3).num_kv_heads, shape_of(V3).head_dim) == (1, 4)
    assert not shape_of(V3 | {"rope_interleave": False}).mla.rope_interleave  # type: ignore[union-attr]


def test_defaults_of_the_third() -> None:
    moe = shape_of(without(V3, "topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor")).moe
    assert moe == shape_of(V3).moe


def test_a_model_whose_layers_are_all_dense_has_no_experts() -> None:
    assert shape_of(without(V2_LITE, "n_routed_experts") | {"first_k_dense_replace": 3}).moe is None
    assert shape_of(V2_LITE | {"first_k_dense_replace": 0}).moe.first_dense_layers == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_token_takes_one_latent_per_layer_whatever_the_tensor_parallel_size(tp: int, dtype: str) -> None:
    assert shape_of(V3).kv_bytes_per_token(tp, dtype) == 3 * (16 + 4) * {"float32": 4, "bfloat16": 2}[dtype]


def test_scores_are_scaled_twice_by_what_yarn_says() -> None:
    shape = shape_of(V2 | {"rope_scaling": YARN})
    assert math.isclose(shape.score_scale, 12**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert shape.rope_scaling.attention_factor == 1.0  # type: ignore[union-attr]
    uneven = shape_of(V2 | {"rope_scaling": YARN | {"mscale": 1.0}}).rope_scaling
    assert math.isclose(uneven.attention_factor, (0.1 * math.log(40) + 1) / (0.0707 * math.log(40) + 1))  # type: ignore[union-attr]
    assert shape_of(V2).score_scale == 12**-0.5


def test_tensors_of_a_layer() -> None:
    dims = expected_tensors(shape_of(V3))
    layer = {name.removeprefix("model.layers.1."): d for name, d in dims.items() if name.startswith("model.layers.1.")}
    assert {name: d for name, d in layer.items() if "experts." not in name} == {
        "input_layernorm.weight": (32,),
        "self_attn.q_a_proj.weight": (12, 32),
        "self_attn.q_a_layernorm.weight": (12,),
        "self_attn.q_b_proj.weight": (48, 12),
        "self_attn.kv_a_proj_with_mqa.weight": (20, 32),
        "self_attn.kv_a_layernorm.weight": (16,),
        "self_attn.kv_b_proj.weight": (56, 16),
        "self_attn.o_proj.weight": (32, 24),
        "post_attention_layernorm.weight": (32,),
        "mlp.gate.weight": (8, 32),
        "mlp.gate.e_score_correction_bias": (8,),
    }
    assert layer["mlp.experts.7.down_proj.weight"] == (32, 20)
    assert layer["mlp.shared_experts.up_proj.weight"] == (40, 32)
    assert len(layer) == 11 + 9 * 3
    assert dims["model.layers.0.mlp.gate_proj.weight"] == (64, 32)
    assert expected_tensors(shape_of(V2_LITE))["model.layers.0.self_attn.q_proj.weight"] == (48, 32)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (V3 | {"index_topk": 2048}, "index_topk = 2048 asks for sparse attention"),
        (V3 | {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1 asks for multi-token prediction"),
        (V3 | {"num_mtp_layers": 2}, "num_mtp_layers = 2 asks for multi-token prediction"),
        (V3 | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config = {'quant_method': 'fp8'} is not"),
        (V3 | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}, "DeepseekV32ForCausalLM"),
        (V3 | {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported, only 'sigmoid'"),
        (V3 | {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported, only 'noaux_tc'"),
        (V2 | {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported, only 'softmax'"),
        (V3 | {"scoring_func": "tanh"}, "scoring_func = 'tanh' is not supported, only 'sigmoid'"),
        (V3 | {"topk_method": "hashed"}, "topk_method = 'hashed' is not supported, only 'noaux_tc'"),
        (V2 | {"topk_method": "hashed"}, "topk_method = 'hashed' is not supported, only 'greedy' or 'group_limited_greedy'"),
        (V2 | {"topk_method": "noaux_tc"}, "only 'greedy' or 'group_limited_greedy'"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob = True is not supported, only False"),
        (V2 | {"rope_interleave": False}, "rope_interleave = False is not supported, only True"),
        (V2 | {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported, only 1"),
        (V2 | {"attention_bias": True}, "attention_bias = True"),
        (V2 | {"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported, only 4"),
        (V2 | {"head_dim": 12}, "head_dim = 12 is not supported, only 4"),
        (V2 | {"qk_rope_head_dim": 5}, "qk_rope_head_dim = 5 is odd"),
        (V2 | {"n_group": 3}, "n_group = 3 does not divide 8 experts"),
        (V2 | {"topk_group": 5}, "topk_group = 5 is more than 4 groups"),
        (V2 | {"num_experts_per_tok": 5}, "num_experts_per_tok = 5 is more than 4 within reach"),
        (V2_LITE | {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than 8 within reach"),
        (V3 | {"n_group": 8}, "n_group = 8 leaves 1 of 8 experts in a group, at least 2"),
        (V3 | {"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        (without(V3, "q_lora_rank"), "setting q_lora_rank is missing"),
        (without(V3, "kv_lora_rank"), "setting kv_lora_rank is missing"),
        (without(V3, "first_k_dense_replace"), "setting first_k_dense_replace is missing"),
        (without(V3, "n_shared_experts"), "setting n_shared_experts is missing"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    assert named in refusal(config)


def test_layers_of_multi_token_prediction_in_the_files_are_refused_by_name(tiny, tmp_path) -> None:  # type: ignore[no-untyped-def]
    from safetensors.numpy import load_file, save_file

    source = tiny(family="deepseek_v3")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.2.eh_proj.weight": tensors["model.norm.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"tensor model\.layers\.2\.eh_proj\.weight is not part of a Deepseek"):
        open_model(tmp_path)


def test_fp8_tensors_are_refused_by_name_whatever_the_settings_say(tiny, tmp_path) -> None:  # type: ignore[no-untyped-def]
    import torch
    from safetensors.torch import load_file, save_file

    source, name = tiny(family="deepseek_v3"), "model.layers.1.self_attn.kv_b_proj.weight"
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"tensor model\.layers\.1\.self_attn\.kv_b_proj\.weight has dtype F8_E4M3, only"):
        open_model(tmp_path)


def test_more_experts_than_tensors_are_refused_before_they_are_spelled_out(tiny, tmp_path) -> None:  # type: ignore[no-untyped-def]
    import json

    source = tiny(family="deepseek_v2")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text()) | {"n_routed_experts": 1 << 30}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match="can't make up 1073741824 experts"):
        open_model(tmp_path)
