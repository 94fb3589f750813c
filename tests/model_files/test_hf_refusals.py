"""Hugging Face directories that are refused: what would be computed wrongly, what is damaged, what does not fit together."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_files import ModelRefused, open_model
from tests.model_files.refusals import refusal
from tests.model_files.tiny_checkpoint import CONFIG, rewrite_header, tiny_tokenizer, tiny_weights, write_hf, write_sharded


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "MixtralForCausalLM (model_type mixtral)"),
        ({"model_type": "qwen3"}, "(model_type qwen3) is not supported"),
        ({"rope_scaling": 3}, "rope_scaling = 3 is not an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported, only 1"),
        ({"sliding_window": 4096}, "sliding_window = 4096 is not supported, only absent or null"),
        ({"attention_bias": True}, "attention_bias = True is not supported, only False"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ({"num_local_experts": 8}, "num_local_experts = 8 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} is not supported"),
        ({"auto_map": {"AutoModel": "x.y"}}, "auto_map"),
        ({"torch_dtype": "int8"}, "dtype 'int8' is not supported, only float64, float32, float16, bfloat16"),
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3 key-value heads"),
        ({"hidden_size": 30}, "hidden size 30 is not a multiple of 4 attention heads"),
        ({"hidden_size": None}, "setting hidden_size is missing"),
        ({"hidden_size": 1 << 40}, "hidden_size = 1099511627776 is not a whole number between 1 and 2147483647"),
        ({"hidden_size": True}, "hidden_size = True is not a whole number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0 is not a finite number above 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no' is not true or false"),
        ({"bos_token_id": [1, 2]}, "bos_token_id = [1, 2] names more than one token"),
        ({"eos_token_id": -1}, "eos_token_id = -1 is not a token id below 300"),
        ({"vocab_size": 299}, "tensor model.embed_tokens.weight has shape [300, 32], the model needs [299, 32]"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight of shape [32] is missing"),
        ({"num_hidden_layers": 1}, "is not part of a LlamaForCausalLM model of 1 layers"),
    ],
)
def test_a_setting_that_would_be_computed_wrongly_is_refused(tmp_path: Path, setting: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(write_hf(tmp_path / "m", CONFIG | setting))


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    assert "no such model, expected a directory with config.json or a GGUF file" in refusal(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "empty/config.json: no such file, a model directory has one" in refusal(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text(json.dumps(CONFIG))
    assert "neither model.safetensors nor model.safetensors.index.json is there" in refusal(tmp_path / "empty")


@pytest.mark.parametrize(("content", "sentence"), [("{", "not valid JSON"), ("[1]", "a JSON object is expected, found list")])
def test_a_damaged_configuration(directory: Path, content: str, sentence: str) -> None:
    (directory / "config.json").write_text(content)
    assert sentence in refusal(directory)


def test_truncated_safetensors(directory: Path) -> None:
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 7, 8, 100):
        path.write_bytes(whole[:size])
        assert f"not a whole safetensors file ({size} bytes" in refusal(directory)
    path.write_bytes(whole[:-1])
    assert "truncated, tensor" in refusal(directory) and f"of {len(whole) - 1}" in refusal(directory)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"dtype": "F32", "shape": [32]}, "the header's entry for model.norm.weight is damaged"),
        ({"dtype": "F32", "shape": [-32], "data_offsets": [0, 128]}, "the header's entry for model.norm.weight is damaged"),
        ({"dtype": "I8", "shape": [32], "data_offsets": [0, 32]}, "has dtype I8, only F64, F32, F16, BF16 are supported"),
        ({"dtype": "F32", "shape": [32], "data_offsets": [0, 64]}, "of shape [32] needs 128 bytes, the header gives it 64"),
        (
            {"dtype": "F32", "shape": [32], "data_offsets": [1 << 40, (1 << 40) + 128]},
            "truncated, tensor model.norm.weight ends",
        ),
        ({"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}, "tensors lm_head.weight and model.norm.weight overlap"),
        ({"dtype": "F32", "shape": [32], "data_offsets": [-128, 0]}, "model.norm.weight has the byte range -128 to 0"),
    ],
)
def test_damaged_tensor_entries(directory: Path, entry: dict[str, Any], sentence: str) -> None:
    rewrite_header(directory / "model.safetensors", {"model.norm.weight": entry})
    assert sentence in refusal(directory)


def test_a_shape_other_than_the_model_needs(tmp_path: Path) -> None:
    weights = tiny_weights() | {"model.norm.weight": np.ones(16, np.float32)}
    assert "has shape [16], the model needs [32]" in refusal(write_hf(tmp_path / "m", weights=weights))


@pytest.mark.parametrize("layers", [10_000_000, 2_000_000_000])
def test_absurd_numbers_of_layers_are_refused_without_spelling_them_out(tmp_path: Path, layers: int) -> None:
    path = write_hf(tmp_path / "m", config=CONFIG | {"num_hidden_layers": layers})
    assert f"tensors can't make up {layers} layers" in refusal(path)


def test_a_chat_template_that_is_not_utf8(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"{{\xff")
    assert "chat_template.jinja: not UTF-8 at byte 2" in refusal(directory)


def test_a_header_that_is_not_json(directory: Path) -> None:
    rewrite_header(directory / "model.safetensors", b"\x00" * 32)
    assert "model.safetensors: not valid JSON" in refusal(directory)


def test_a_bias_that_would_be_left_out_is_refused(tmp_path: Path) -> None:
    weights = tiny_weights() | {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}
    assert "tensor model.layers.0.self_attn.q_proj.bias is not part of" in refusal(write_hf(tmp_path / "m", weights=weights))
    weights = tiny_weights() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    open_model(write_hf(tmp_path / "old", weights=weights))


def test_shards_and_index_must_agree(tmp_path: Path) -> None:
    directory = write_sharded(tmp_path / "m")
    index = directory / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    for change, sentence in (
        ({"weight_map": 3}, "weight_map is missing or damaged"),
        ({"weight_map": {"a": "../x.safetensors"}}, "shard '../x.safetensors' is not a plain file name"),
        ({"weight_map": document["weight_map"] | {"ghost": "model-00001-of-00003.safetensors"}}, "tensor ghost is missing"),
    ):
        index.write_text(json.dumps(change))
        assert sentence in refusal(directory)
    index.write_text(json.dumps(document))
    (directory / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors: shard named by model.safetensors.index.json is missing" in refusal(directory)
    index.unlink()
    assert "2 shards but no model.safetensors.index.json" in refusal(directory)


def test_a_missing_damaged_or_foreign_tokenizer(directory: Path) -> None:
    path = directory / "tokenizer.json"
    model = open_model(directory)
    whole = model.tokenizer()
    assert model.tokenizer() is whole
    for content, sentence in (("{}", "not a tokenizer"), (None, "no such file, text needs it")):
        path.unlink()
        if content is not None:
            path.write_text(content)
        with pytest.raises(ModelRefused, match=sentence):
            open_model(directory).tokenizer()
    large = tiny_tokenizer()
    large.add_tokens([f"<word{index}>" for index in range(40)])
    large.save(str(path))
    with pytest.raises(ModelRefused, match="token id 304 is outside the model's vocabulary of 300"):
        open_model(directory).tokenizer()
