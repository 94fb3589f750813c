"""GGUF files of the families beside Llama: names, row order, tokenizer, and what is refused by name."""

import unicodedata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from model_files import expected_tensors, open_model
from tests.model_files.refusals import refusal
from tests.model_files.tiny_checkpoint import HEAD_DIM, MERGES, SPECIALS, tiny_weights, vocabulary, write_gguf

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", gguf.MODEL_ARCH.LLAMA),
    "qwen2": ("Qwen2ForCausalLM", gguf.MODEL_ARCH.QWEN2),
    "qwen3": ("Qwen3ForCausalLM", gguf.MODEL_ARCH.QWEN3),
}


@pytest.fixture(params=ARCHITECTURES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def path(tmp_path: Path, family: str) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", family=family)


def test_shape(path: Path, family: str) -> None:
    shape = open_model(path).shape
    assert (shape.architecture, shape.qkv_bias, shape.qk_norm) == (
        ARCHITECTURES[family][0],
        family == "qwen2",
        family == "qwen3",
    )
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (2, 32, 4, 2, HEAD_DIM)
    assert (shape.max_position, shape.rope_theta, shape.rope_scaling) == (256, 5000.0, None)


def test_a_head_may_be_wider_than_hidden_over_heads(tmp_path: Path) -> None:
    weights = tiny_weights(family="qwen3")
    for name, array in weights.items():
        if "self_attn" in name:
            axis = 1 if "o_proj" in name else 0
            weights[name] = np.concatenate((array, array), axis)
    settings = {"qwen3.attention.key_length": 16, "qwen3.attention.value_length": 16, "qwen3.rope.dimension_count": None}
    shape = open_model(write_gguf(tmp_path / "m.gguf", weights, settings=settings, family="qwen3")).shape
    assert (shape.head_dim, shape.hidden_size, shape.num_heads) == (16, 32, 4)


def test_every_tensor_has_the_name_that_the_gguf_library_gives_it(path: Path, family: str) -> None:
    model = open_model(path)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family][1], model.shape.num_layers)
    for name in expected_tensors(model.shape):
        assert model.tensors[name].source_name == names.get_name(name, try_suffixes=(".weight", ".bias"))


def test_every_tensor_reads_as_the_hugging_face_one(path: Path, family: str) -> None:
    """Llama's q and k come back from pairs of rows; Qwen's were never reordered."""
    model = open_model(path)
    weights = tiny_weights(family=family)
    assert set(model.tensors) == set(weights)
    for name, expected in weights.items():
        np.testing.assert_array_equal(model.read_rows(name, 0, len(expected)), expected, err_msg=name)
        np.testing.assert_array_equal(model.read_rows(name, 3, 7), expected[3:7], err_msg=name)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"], indirect=True)
def test_every_tensor_reads_as_transformers_reads_it(path: Path, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = open_model(path)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.head_dim = HEAD_DIM  # it takes every Qwen3 file to have heads of 128
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config, dtype="float32")
    assert type(reference).__name__ == model.shape.architecture
    assert config.rope_parameters["rope_theta"] == model.shape.rope_theta
    state: dict[str, Any] = reference.state_dict()
    for name, info in model.tensors.items():
        np.testing.assert_array_equal(model.read_rows(name, 0, info.shape[0]), state[name].numpy(), err_msg=name)


@pytest.mark.parametrize(
    ("family", "missing"),
    [("qwen2", "model.layers.1.self_attn.k_proj.bias"), ("qwen3", "model.layers.0.self_attn.q_norm.weight")],
    indirect=["family"],
)
def test_what_the_family_adds_must_be_there(tmp_path: Path, family: str, missing: str) -> None:
    weights = tiny_weights(family=family)
    dims = list(weights.pop(missing).shape)
    path = write_gguf(tmp_path / "m.gguf", weights, family=family)
    assert f"tensor {missing} of shape {dims} is missing" in refusal(path)


@pytest.mark.parametrize("other", ["qwen2", "qwen3"])
def test_what_another_family_adds_is_refused(tmp_path: Path, other: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_weights(family=other), family="llama")
    assert "is not part of a LlamaForCausalLM model of 2 layers" in refusal(path)


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("expert_count", 4, "expert_count = 4 is not supported, only 0"),
        ("rope.scaling.type", "yarn", "rope.scaling.type = 'yarn' is not supported, only 'none'"),
        ("rope.scaling.type", "linear", "rope.scaling.type = 'linear' is not supported"),
        ("rope.scaling.factor", 4.0, "rope.scaling.factor = 4.0 is not supported"),
        ("rope.scaling.attn_factor", 0.5, "rope.scaling.attn_factor = 0.5 is not supported"),
        ("rope.scale_linear", 2.0, "rope.scale_linear = 2.0 is not supported"),
        ("attention.sliding_window", 64, "attention.sliding_window = 64 is not supported"),
        ("attention.clamp_kqv", 8.0, "attention.clamp_kqv = 8.0 is not supported"),
        ("attention.scale", 0.5, "attention.scale = 0.5 is not supported"),
        ("attn_logit_softcapping", 50.0, "attn_logit_softcapping = 50.0 is not supported"),
        ("final_logit_softcapping", 30.0, "final_logit_softcapping = 30.0 is not supported"),
        ("attention.value_length", 16, "attention.value_length = 16 is not supported, only 8"),
        ("rope.dimension_count", 4, "rope.dimension_count = 4 is not supported, only 8"),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"], indirect=True)
def test_a_setting_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, family: str, setting: str, value: Any, sentence: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", settings={f"{family}.{setting}": value}, family=family)
    assert f"{family}.{sentence}" in refusal(path)


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen3moe", "qwen2vl", "gemma2", "phi3"])
def test_other_architectures_are_refused_by_name(tmp_path: Path, architecture: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", settings={"general.architecture": architecture})
    assert f"architecture '{architecture}' is not supported, only llama, qwen2, qwen3" in refusal(path)


TEXTS = [
    "hello world, 1234567 words\n\n  and   spaces ",
    "They'LL pay 12,5 € — it's 3rd…\r\n\r\n\tTabs\t",
    unicodedata.normalize("NFD", "Ångström café für Đặng"),
    "<s>hello</s>  日本語のテスト 12 ٣٤ 🙂👩‍💻",
    " leading,trailing \n",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_equals_that_of_transformers_on_the_same_vocabulary(tmp_path: Path, text: str) -> None:
    from transformers import Qwen2Tokenizer

    reference = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(vocabulary())},
        merges=list(MERGES),
        unk_token=None,
        bos_token=SPECIALS[1],
        eos_token=SPECIALS[2],
        pad_token=SPECIALS[0],
    )
    model = open_model(write_gguf(tmp_path / "m.gguf", settings={"tokenizer.ggml.pre": "qwen2"}, family="qwen2"))
    ids = model.tokenizer().encode(text).ids
    assert ids == reference.encode(text, add_special_tokens=False)
    assert model.tokenizer().decode(ids, skip_special_tokens=False) == reference.decode(ids)
    assert model.add_bos is False


def test_digits_stand_alone_and_text_is_composed(tmp_path: Path) -> None:
    tokenizer = open_model(write_gguf(tmp_path / "m.gguf", settings={"tokenizer.ggml.pre": "qwen2"})).tokenizer()
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str("I'll pay 123  EUR")
    assert [piece for piece, _ in pieces] == ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "Ġ", "ĠEUR"]
    assert tokenizer.decode(tokenizer.encode("cafe\u0301").ids) == "café"
