"""The text edge as the coordinator uses it."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from coordinator import chat
from coordinator.text import MAX_MESSAGES, TextEdge
from coordinator.text_errors import TextRefused
from model_files import open_model
from tests.model_files.tiny_checkpoint import tiny_tokenizer, write_hf

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def edge(directory: Path, max_text_bytes: int = 1000, **companion: Any) -> TextEdge:
    write_hf(directory)
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(specials | companion))
    return TextEdge(open_model(directory), max_text_bytes)


def test_facts_of_the_model(tmp_path: Path) -> None:
    text = edge(tmp_path)
    assert (text.vocab_size, text.eos_token_ids) == (300, (2,))


@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_is_added_once_if_the_model_says_so(tmp_path: Path, add_bos: bool) -> None:
    text = edge(tmp_path, add_bos_token=add_bos, chat_template=TEMPLATE)
    plain = tiny_tokenizer().encode("hello world").ids
    assert text.encode("hello world") == [1] * add_bos + plain
    chat = text.encode_chat([("user", "hello"), ("user", "hé")])
    assert chat == tiny_tokenizer().encode("<s>user:hello</s>user:hé</s>a:").ids
    assert chat.count(1) == 1


def test_a_detokenizer_turns_ids_back_into_text(tmp_path: Path) -> None:
    text = edge(tmp_path)
    detokenizer = text.detokenizer(["rl"])
    assert detokenizer.push(text.encode("hello world")).text == "hello wo"


def test_l4_bad_text_is_refused_and_the_next_works(tmp_path: Path) -> None:
    text = edge(tmp_path, chat_template=TEMPLATE)
    with pytest.raises(TextRefused, match=r"^text = \(empty\): the limit is at least 1 character$"):
        text.encode("")
    with pytest.raises(TextRefused, match=r"^text = 1001 bytes: the limit is 1000 bytes$"):
        text.encode("é" * 500 + "x")
    assert len(text.encode("x" * 1000)) == 1000
    for messages, sentence in (
        ([], rf"^chat = 0 messages: the limit is 1 to {MAX_MESSAGES} messages$"),
        ([("user", "x")] * (MAX_MESSAGES + 1), rf"^chat = {MAX_MESSAGES + 1} messages"),
        ([("", "x")], r"^chat\.role = \(empty\)"),
        ([("user", "x" * 997)], r"^chat = 1001 bytes: the limit is 1000 bytes$"),
        ([("user", "x" * 990)], r"^chat = 10\d\d bytes: the limit is 1000 bytes$"),
    ):
        with pytest.raises(TextRefused, match=sentence):
            text.encode_chat(messages)
    assert text.encode_chat([("user", "hello")])


def test_a_short_conversation_takes_nothing_from_a_long_one_on_another_thread(tmp_path: Path, monkeypatch: Any) -> None:
    """The long one stands between its budget and its rendering while the short one is rendered as a whole."""
    budgeted, go_on = threading.Event(), threading.Event()

    class Slow(chat.Environment):
        def render_template(self, *args: Any, messages: list[dict[str, str]], **rest: Any) -> str:
            if len(messages) > 1:
                budgeted.set()
                assert go_on.wait(30)
            return super().render_template(*args, messages=messages, **rest)

    monkeypatch.setattr(chat, "Environment", Slow)
    monkeypatch.setattr(chat, "_FUEL_PER_MESSAGE", 5_000)
    monkeypatch.setattr(chat, "_BASE_FUEL", 0)
    work = "{% for m in messages %}{% for i in range(500) %}{% endfor %}{{ m.content }}{% endfor %}"
    text = edge(tmp_path, chat_template=work)
    alone = text.encode_chat([("user", "hello")])
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(text.encode_chat, [("user", "hello")] * 40)
        assert budgeted.wait(30)
        try:
            assert text.encode_chat([("user", "hello")]) == alone
        finally:
            go_on.set()
        assert len(long.result(30)) >= len(alone)


def test_a_model_without_a_template_still_takes_text(tmp_path: Path) -> None:
    text = edge(tmp_path)
    with pytest.raises(TextRefused, match="the model has no chat template"):
        text.encode_chat([("user", "hello")])
    assert text.encode("hello")


def test_a_broken_template_is_refused_when_it_is_used(tmp_path: Path) -> None:
    text = edge(tmp_path, chat_template="{% if %}")
    with pytest.raises(TextRefused, match="a chat template that compiles"):
        text.encode_chat([("user", "hello")])
    assert text.encode("hello")


def test_refused_values_are_shortened() -> None:
    refused = TextRefused("text", "x" * 100, "something")
    assert refused.value == "x" * 63 + "…"
