"""The default model's text edge: fixed ids and texts, and `transformers` as the reference."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.text import TextEdge
from cp_client.default_model import default_model_path
from model_files import ModelFiles, open_model

CORPUS = (
    "The kettle sang at 07:45, and 1234 swallows left.",
    "Les mouettes n'ont pas d'heure; 3,14 œufs à l'aube.",
    "Über siebenundzwanzig Brücken läuft der Fluß.",
    "Птицы вернулись в 2031 году.",
    "渡り鳥は三日月の夜に帰る。",
    "강가에 불빛이 번졌다.",
    "🙂 👩‍👩‍👧 e\u0301 \u200b|\ttabs\n\n\n  and   spaces   ",
    "def weave(x: int) -> int:\n    return x << 2  # twice two",
    "<|im_start|>user\nHi<|im_end|>\n<repo_name>x<|endoftext|>",
    "don't WE'LL I'm 'quoted' ''",
)
TALKS: tuple[list[tuple[str, str]], ...] = (
    [("user", "Name a river.")],
    [("system", "Answer in rhyme."), ("user", "Why?\n"), ("assistant", "Because."), ("user", " and? ")],
)


@pytest.fixture(scope="module")
def model() -> ModelFiles:
    return open_model(default_model_path())


@pytest.fixture(scope="module")
def edge(model: ModelFiles) -> TextEdge:
    return TextEdge(model)


def test_facts_of_the_default_model(model: ModelFiles) -> None:
    shape = model.shape
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (30, 576, 9, 3, 64)
    assert (shape.vocab_size, shape.max_position, shape.rope_theta, shape.tie_embeddings) == (49152, 8192, 100000.0, True)
    assert (model.bos_token_id, model.eos_token_ids, model.add_bos) == (1, (2,), False)
    assert model.special_tokens["eos_token"] == "<|im_end|>"


def test_every_text_comes_back(edge: TextEdge) -> None:
    for text in CORPUS:
        detokenizer = edge.detokenizer()
        seen = "".join(detokenizer.push([token_id]).text for token_id in edge.encode(text)) + detokenizer.flush()
        for special in ("<|im_start|>", "<|im_end|>", "<repo_name>", "<|endoftext|>"):
            text = text.replace(special, "")
        assert seen == text


def test_numerals_stand_alone(edge: TextEdge, model: ModelFiles) -> None:
    """The file's own pre-tokenizer cuts numerals of every kind, which `transformers` leaves out when it reads GGUF."""
    assert len(edge.encode("12345")) == 5
    space = model.tokenizer().token_to_id("Ġ")
    assert edge.encode("a 2")[1] == edge.encode("a ½")[1] == space


def test_chat_ids(edge: TextEdge, model: ModelFiles) -> None:
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nName a river.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert edge.encode_chat(TALKS[0]) == model.tokenizer().encode(expected).ids


@pytest.mark.sweep
def test_ids_and_chat_equal_transformers(edge: TextEdge, model: ModelFiles, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    reference: Any = AutoTokenizer.from_pretrained(model.path.parent, gguf_file=model.path.name)
    for text in CORPUS:
        assert edge.encode(text) == reference.encode(text, add_special_tokens=False), text
    for talk in TALKS:
        messages = [{"role": role, "content": content} for role, content in talk]
        text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert edge.encode_chat(talk) == reference.encode(text, add_special_tokens=False)
