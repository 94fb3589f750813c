"""Hugging Face directories: configuration, tensors of safetensors, companions."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from model_files import expected_tensors, open_model
from tests.model_files.tiny_checkpoint import CONFIG, rewrite_header, tiny_tokenizer, tiny_weights, write_hf, write_sharded


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
