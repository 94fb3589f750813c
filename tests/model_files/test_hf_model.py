"""Hugging Face directories: configuration, headers of safetensors, companions, refusals."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from model_files import ModelRefused, expected_tensors, open_model
from tests.model_files.tiny_checkpoint import CONFIG, tiny_tokenizer, tiny_weights, write_hf, write_sharded


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "tiny")


def refusal(path: Path) -> str:
    with pytest.raises(ModelRefused) as caught:
        open_model(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite_header(path: Path, change: dict[str, Any] | bytes) -> None:
    """Replace entries of a safetensors header (or the whole header) and keep the data."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = change if isinstance(change, bytes) else json.dumps(json.loads(content[8 : 8 + length]) | change).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def test_shape_and_identity(directory: Path) -> None:
    model = open_model(str(directory))
    shape = model.shape
    assert (model.kind, model.name, shape.architecture, shape.dtype) == ("hf", "tiny", "LlamaForCausalLM", "float32")
    assert (shape.num_layers, shape.hidden_size, shape.intermediate_size, shape.vocab_size) == (2, 32, 64, 300)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.max_position) == (4, 2, 8, 256)
    assert (shape.rms_norm_eps, shape.rope_theta, shape.tie_embeddings) == (1e-5, 5000.0, False)
    assert (model.bos_token_id, model.eos_token_ids, model.chat_template, model.special_tokens) == (1, (2,), None, {})


@pytest.mark.parametrize("write", [write_hf, write_sharded])
def test_tensors_of_one_file_or_several(tmp_path: Path, write: Any) -> None:
    model = open_model(write(tmp_path / "m", weights=tiny_weights()))
    assert list(model.tensors) == list(expected_tensors(model.shape))
    for name, expected in tiny_weights().items():
        info = model.tensors[name]
        assert (info.shape, info.dtype, info.source_name, info.file.parent) == (expected.shape, "F32", name, tmp_path / "m")
        np.testing.assert_array_equal(model.read_rows(name, 1, 7), expected[1:7], err_msg=name)


def test_half_precision_rows_become_float32(tmp_path: Path) -> None:
    weights = {name: (array * 8).round().astype(np.float16) for name, array in tiny_weights().items()}
    model = open_model(write_hf(tmp_path / "half", weights=weights))
    rows = model.read_rows("lm_head.weight", 290, 300)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, weights["lm_head.weight"][290:].astype(np.float32))


def test_bfloat16_rows_become_float32(tmp_path: Path) -> None:
    bits = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in tiny_weights().items()}
    path = write_hf(tmp_path / "bf16", weights=bits) / "model.safetensors"
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    rewrite_header(path, {name: entry | {"dtype": "BF16"} for name, entry in header.items()})
    rows = open_model(path.parent).read_rows("model.norm.weight", 3, 32)
    np.testing.assert_array_equal(rows, (bits["model.norm.weight"][3:].astype(np.uint32) << 16).view(np.float32))


def test_tied_head_may_be_stored_or_not(tmp_path: Path) -> None:
    config = CONFIG | {"tie_word_embeddings": True}
    hashes = set()
    for name, tied in (("without", True), ("with", False)):
        model = open_model(write_hf(tmp_path / name, config, tiny_weights(tied)))
        assert "lm_head.weight" not in model.tensors
        hashes.add(model.hash)
    assert len(hashes) == 1


def test_hash_covers_the_rotary_positions(tmp_path: Path) -> None:
    linear, llama3 = {"rope_type": "linear", "factor": 2.0}, {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scalings = [None, linear, linear | {"factor": 3.0}, llama3 | {"rope_type": "llama3", "factor": 2.0}]
    scalings += [{"rope_type": "yarn", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0}]
    models = [write_hf(tmp_path / str(i), CONFIG | {"rope_scaling": scaling}) for i, scaling in enumerate(scalings)]
    assert len({open_model(model).hash for model in models}) == len(scalings)


def test_new_style_rope_parameters_and_dtype(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key not in ("rope_theta", "torch_dtype")}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}, "dtype": "float16"}
    shape = open_model(write_hf(tmp_path / "m", config)).shape
    assert (shape.rope_theta, shape.dtype) == (123.0, "float16")


def test_absent_settings_take_the_documented_defaults(tmp_path: Path) -> None:
    needed = ("architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    config = {key: CONFIG[key] for key in (*needed, "num_attention_heads")} | {"head_dim": 8}
    weights = {
        name: np.zeros((32, 32), np.float32) if name.endswith(("k_proj.weight", "v_proj.weight")) else array
        for name, array in tiny_weights().items()
    }
    shape = open_model(write_hf(tmp_path / "m", config, weights)).shape
    assert (shape.num_kv_heads, shape.rms_norm_eps, shape.rope_theta, shape.max_position) == (4, 1e-6, 10000.0, 2048)
    assert (shape.tie_embeddings, shape.dtype) == (False, "float32")


def test_generation_config_names_the_stop_tokens(directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert open_model(directory).eos_token_ids == (2, 7)


def test_tokenizer_config_names_template_and_specials(directory: Path) -> None:
    companion = directory / "tokenizer_config.json"
    companion.write_text(
        json.dumps({"chat_template": "A", "bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None})
    )
    model = open_model(directory)
    assert (model.chat_template, model.special_tokens) == ("A", {"bos_token": "<s>", "eos_token": "</s>"})
    companion.write_text(
        json.dumps({"chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]})
    )
    assert open_model(directory).chat_template == "D"
    (directory / "chat_template.jinja").write_text("J")
    assert open_model(directory).chat_template == "J"


def test_bos_is_added_as_stated_else_as_the_tokenizer_does(directory: Path) -> None:
    assert open_model(directory).add_bos is False
    tokenizer = tiny_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    assert open_model(directory).add_bos is True
    (directory / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert open_model(directory).add_bos is False


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


DOWN_PROJ = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("columns", [(0, 64), (0, 0), (13, 14), (20, 64)])
@pytest.mark.parametrize("rows", [(0, 32), (5, 9), (7, 7)])
def test_columns_of_a_matrix(directory: Path, rows: tuple[int, int], columns: tuple[int, int]) -> None:
    part = open_model(directory).read_rows(DOWN_PROJ, *rows, columns)
    np.testing.assert_array_equal(part, tiny_weights()[DOWN_PROJ][slice(*rows), slice(*columns)])
    assert part.flags.writeable and part.dtype == np.float32


def test_columns_alone_take_no_memory_for_the_rest_of_their_rows(tmp_path: Path) -> None:
    wide = np.ones((32, 40_000), np.float32)
    config = CONFIG | {"intermediate_size": 40_000}
    weights = {name: wide if "down_proj" in name else array for name, array in tiny_weights().items()}
    weights |= {name: np.ascontiguousarray(wide.T) for name in weights if "gate_proj" in name or "up_proj" in name}
    model = open_model(write_hf(tmp_path / "wide", config, weights))
    tracemalloc.start()
    part = model.read_rows(DOWN_PROJ, 0, 32, (20_000, 20_400))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part.all()
    assert peak < 4 * part.nbytes < wide.nbytes / 10


@pytest.mark.parametrize(("name", "columns"), [(DOWN_PROJ, (0, 65)), (DOWN_PROJ, (9, 8)), ("model.norm.weight", (0, 1))])
def test_columns_outside_the_tensor_are_refused(directory: Path, name: str, columns: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"columns {columns[0]}\.\.{columns[1]} of {name} do not exist"):
        open_model(directory).read_rows(name, 0, 2, columns)
