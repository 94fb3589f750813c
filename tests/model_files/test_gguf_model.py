"""GGUF files: names, row order, dequantised slices, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from gguf.quants import dequantize, quantize

from model_files import ModelRefused, expected_tensors, open_model
from tests.model_files.refusals import refusal
from tests.model_files.tiny_checkpoint import tiny_tokenizer, tiny_weights, write_gguf, write_hf

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_shape_and_identity(whole: Path) -> None:
    model = open_model(whole)
    shape = model.shape
    assert (model.kind, model.name, shape.architecture, shape.dtype) == ("gguf", "Tiny", "LlamaForCausalLM", "bfloat16")
    assert (shape.num_layers, shape.hidden_size, shape.intermediate_size, shape.vocab_size) == (2, 32, 64, 300)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.max_position) == (4, 2, 8, 256)
    assert (shape.rms_norm_eps, shape.rope_theta, shape.tie_embeddings) == (pytest.approx(1e-5), 5000.0, False)
    assert (model.bos_token_id, model.eos_token_ids, model.add_bos, model.chat_template) == (1, (2,), False, None)
    assert model.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_every_tensor_reads_as_the_hugging_face_one(whole: Path) -> None:
    model = open_model(whole)
    weights = tiny_weights()
    assert list(model.tensors) == list(expected_tensors(model.shape))
    for name, expected in weights.items():
        assert model.tensors[name].shape == expected.shape
        np.testing.assert_array_equal(model.read_rows(name, 0, expected.shape[0]), expected, err_msg=name)


@pytest.mark.parametrize("name", [Q_PROJ, K_PROJ, "model.layers.0.mlp.down_proj.weight", "model.norm.weight"])
def test_any_slice_equals_the_slice_of_the_whole(whole: Path, name: str) -> None:
    model, expected = open_model(whole), tiny_weights()[name]
    for start in range(len(expected)):
        for stop in range(start, len(expected) + 1, 5):
            rows = model.read_rows(name, start, stop)
            np.testing.assert_array_equal(rows, expected[start:stop])
            assert rows.flags.writeable and rows.flags.owndata and rows.dtype == np.float32


@pytest.mark.parametrize("kind", [Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_1])
def test_quantised_rows_are_dequantised(tmp_path: Path, kind: Quant) -> None:
    model = open_model(write_gguf(tmp_path / "q.gguf", matrices=kind))
    for name in (K_PROJ, "model.embed_tokens.weight"):
        expected = dequantize(quantize(tiny_weights()[name], kind), kind)
        assert model.tensors[name].dtype == kind.name
        np.testing.assert_array_equal(model.read_rows(name, 0, len(expected)), expected)


def test_rows_outside_the_tensor_are_refused(whole: Path) -> None:
    model = open_model(whole)
    for start, stop in ((-1, 2), (0, 17), (3, 2)):
        with pytest.raises(ValueError, match=r"do not exist, it has 16"):
            model.read_rows(K_PROJ, start, stop)
    with pytest.raises(KeyError):
        model.read_rows("model.layers.9.mlp.up_proj.weight", 0, 1)


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    model = open_model(write_gguf(tmp_path / "tied.gguf", tiny_weights(tied=True)))
    assert model.shape.tie_embeddings
    assert "lm_head.weight" not in model.tensors


def test_hash_is_the_structure_s(whole: Path, tmp_path: Path) -> None:
    copy = write_gguf(tmp_path / "copy.gguf")
    quantised = write_gguf(tmp_path / "quantised.gguf", matrices=Quant.Q8_0)
    other_rope = write_gguf(tmp_path / "rope.gguf", settings={"llama.rope.freq_base": 6000.0})
    hashes = [open_model(path).hash for path in (whole, copy, quantised, other_rope)]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3 and len(hashes[0]) == 64


def test_several_stop_tokens(tmp_path: Path) -> None:
    settings = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    assert open_model(write_gguf(tmp_path / "m.gguf", settings=settings)).eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"general.architecture": "qwen2moe"}, "architecture 'qwen2moe' is not supported, only llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8 is not supported, only 0"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = 'yarn' is not supported"),
        ({"llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.factor = 4.0 is not supported, only 0 or 1"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count = 4 is not supported, only 8"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length = 16 is not supported, only 8"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window = 64 is not supported"),
        ({"llama.rope.scale_linear": 2.0}, "llama.rope.scale_linear = 2.0 is not supported"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads are not a multiple of 3 key-value heads"),
        ({"llama.attention.key_length": 7}, "head_dim = 7 is odd"),
        ({"llama.embedding_length": 30}, "hidden size 30 is not a multiple of 4 attention heads"),
        ({"llama.block_count": None}, "setting llama.block_count is missing"),
        ({"llama.block_count": 0}, "llama.block_count = 0 is not a whole number between 1 and 2147483647"),
        ({"llama.block_count": 3}, "tensor model.layers.2.input_layernorm.weight of shape [32] is missing"),
        ({"llama.block_count": 1}, "is not part of a LlamaForCausalLM model of 1 layers"),
        ({"llama.feed_forward_length": 48}, "has shape [64, 32], the model needs [48, 32]"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "= nan is not a finite number above 0"),
        ({"tokenizer.ggml.eos_token_id": 300}, "tokenizer.ggml.eos_token_id = 300 is not a token id below 300"),
    ],
)
def test_a_setting_that_would_be_computed_wrongly_is_refused(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(write_gguf(tmp_path / "refused.gguf", settings=settings))


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ("model.layers.0.attn_q.bias", "tensor blk.0.attn_q.bias.weight is not part of a model of any supported family"),
        ("rope_freqs", "tensor rope_freqs.weight scales the rotary positions"),
    ],
)
def test_a_weight_that_would_be_left_out_is_refused(tmp_path: Path, extra: str, sentence: str) -> None:
    weights = tiny_weights() | {extra + ".weight": np.zeros(32, np.float32)}
    assert sentence in refusal(write_gguf(tmp_path / "refused.gguf", weights))


def test_a_quantisation_nobody_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    name = b"output_norm.weight"
    where = whole.index(name) + len(name) + 4 + 8
    path.write_bytes(whole[:where] + (24).to_bytes(4, "little") + whole[where + 4 :])
    assert "tensors of type I8 are not supported" in refusal(path)


def test_tokenizer_equals_the_hugging_face_one(whole: Path) -> None:
    tokenizer, reference = open_model(whole).tokenizer(), tiny_tokenizer()
    text = "<s>hello world, héllo\n\n  wörld 🙂</s>"
    ids = tokenizer.encode(text).ids
    assert ids == reference.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello world, héllo\n\n  wörld 🙂"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'ll", "Ġpay", "Ġ12345", "Ġ", "ĠEUR"]),
        ("smollm", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "Ġ", "ĠEUR"]),
        ("llama-bpe", ["I", "'ll", "Ġpay", "Ġ", "123", "45", "Ġ", "ĠEUR"]),
    ],
)
def test_text_is_cut_as_the_family_does(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = open_model(write_gguf(tmp_path / "m.gguf", settings={"tokenizer.ggml.pre": pre})).tokenizer()
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("I'll pay 12345  EUR")] == pieces


@pytest.mark.parametrize(
    ("pre", "stated", "expected"), [("smollm", None, False), ("llama-bpe", None, True), ("smollm", True, True)]
)
def test_bos_is_added_if_the_file_or_its_family_says_so(tmp_path: Path, pre: str, stated: bool | None, expected: bool) -> None:
    settings = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": stated}
    assert open_model(write_gguf(tmp_path / "m.gguf", settings=settings)).add_bos is expected


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama' with 'smollm' is not supported"),
        ({"tokenizer.ggml.pre": "deepseek"}, "tokenizer 'gpt2' with 'deepseek' is not supported"),
        ({"tokenizer.ggml.tokens": ["a"]}, "1 tokens with 265 token types do not fit a vocabulary of 300"),
        ({"tokenizer.ggml.merges": ["h zz"]}, "the tokenizer's merges do not fit its vocabulary"),
        ({"tokenizer.ggml.merges": ["hello"]}, "merge 'hello' is not two tokens"),
    ],
)
def test_an_unknown_or_damaged_tokenizer_is_refused_when_asked_for(
    tmp_path: Path, settings: dict[str, Any], sentence: str
) -> None:
    model = open_model(write_gguf(tmp_path / "m.gguf", settings=settings))
    with pytest.raises(ModelRefused) as caught:
        model.tokenizer()
    assert sentence in str(caught.value)


def test_user_defined_tokens_are_whole_and_shown(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf")
    types = [3, 3, 4] + [1] * 262
    tokenizer = open_model(write_gguf(tmp_path / "m.gguf", settings={"tokenizer.ggml.token_type": types})).tokenizer()
    ids = tokenizer.encode("<s>he</s>").ids
    assert ids[0] == 1 and ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he</s>"


@pytest.mark.parametrize("kind", [Quant.F32, Quant.F16, Quant.Q8_0, Quant.Q4_1])
@pytest.mark.parametrize("name", [Q_PROJ, "model.layers.0.mlp.down_proj.weight"])
def test_any_columns_equal_those_of_the_whole(tmp_path: Path, kind: Quant, name: str) -> None:
    """Quantisation blocks have 32 columns: ranges begin and end at their edges and inside."""
    model = open_model(write_gguf(tmp_path / "q.gguf", matrices=kind))
    rows, width = model.tensors[name].shape
    whole = model.read_rows(name, 0, rows)
    for columns in [(0, width), (0, 0), (0, 1), (width - 1, width), (5, width - 3), (width // 2, width)]:
        part = model.read_rows(name, 3, 21, columns)
        np.testing.assert_array_equal(part, whole[3:21, slice(*columns)])
        assert part.flags.writeable and part.flags.owndata


def test_only_the_blocks_of_the_columns_are_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(write_gguf(tmp_path / "q.gguf", matrices=Quant.Q8_0))
    seen = []

    def watched(raw: np.ndarray, kind: Quant) -> np.ndarray:
        seen.append(raw.shape)
        return dequantize(raw, kind)

    monkeypatch.setattr("model_files.gguf_model.dequantize", watched)
    model.read_rows("model.layers.0.mlp.down_proj.weight", 0, 4, (33, 60))
    assert seen == [(4, 34)]  # one block of 32 columns, 34 bytes, of the two in a row
