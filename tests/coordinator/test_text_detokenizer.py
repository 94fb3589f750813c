"""Incremental detokenisation equals decoding everything at once, for every way to cut the ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from coordinator.detokenizer import Detokenizer, Emission
from coordinator.token_bytes import TokenBytes
from model_files import ModelRefused
from tests.model_files.tiny_checkpoint import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TOKEN_BYTES = TokenBytes(TOKENIZER)
SAMPLES = ("hello world", "naïve café", "🙂👩‍👩‍👧‍👦", "e\u0301\u0323", "漢字かな交じり文", "a\u0000\ufffd b", "\n\n  \t")

ids_lists = st.lists(st.integers(0, 299), max_size=24)
"""Any ids: special tokens, unfinished characters, bytes that are no UTF-8, ids without a token."""
pushes = st.lists(ids_lists, max_size=6)


def run(cut: list[list[int]], stop: tuple[str, ...] = (), min_tokens: int = 0) -> tuple[str, bool]:
    """(text, stopped?)."""
    detokenizer = Detokenizer(TOKEN_BYTES, stop, min_tokens)
    emissions = [detokenizer.push(ids) for ids in cut]
    text = "".join(emission.text for emission in emissions) + detokenizer.flush()
    return text, detokenizer.stopped


@given(pushes)
def test_any_cut_equals_decoding_everything_at_once(cut: list[list[int]]) -> None:
    ids = [token_id for push in cut for token_id in push]
    assert run(cut) == (TOKENIZER.decode(ids, skip_special_tokens=True), False)


@given(st.sampled_from(SAMPLES), st.integers(1, 5))
def test_texts_come_back_and_no_character_is_split(text: str, size: int) -> None:
    ids = TOKENIZER.encode(text).ids
    detokenizer, seen = Detokenizer(TOKEN_BYTES), ""
    for start in range(0, len(ids), size):
        seen += detokenizer.push(ids[start : start + size]).text
        assert text.startswith(seen)
    assert seen + detokenizer.flush() == text


@given(pushes, st.lists(st.sampled_from(["he", "hello", "lo w", "\ufffd", "🙂", "a", "  "]), min_size=1, max_size=3))
def test_a_stop_string_cuts_alike_for_any_cut(cut: list[list[int]], stop: list[str]) -> None:
    whole = run([[token_id for push in cut for token_id in push]], tuple(stop))
    assert run(cut, tuple(stop)) == whole
    assert run([[token_id] for push in cut for token_id in push], tuple(stop)) == whole


def test_nothing_follows_a_stop_string() -> None:
    ids = TOKENIZER.encode("hello world, hello").ids
    detokenizer = Detokenizer(TOKEN_BYTES, ["d,"])
    assert detokenizer.push(ids) == Emission("hello worl", True)
    assert detokenizer.push(ids) == Emission("", True)
    assert detokenizer.flush() == ""


def test_a_stop_string_that_min_tokens_comes_before_is_text() -> None:
    text = "abcabcabcabc"
    ids = [TOKENIZER.token_to_id(character) for character in text]
    assert None not in ids
    ends = {}
    for min_tokens in range(len(ids) + 1):
        whole = run([ids], ("bc", "ca"), min_tokens)
        assert run([[token_id] for token_id in ids], ("bc", "ca"), min_tokens) == whole
        ends[min_tokens] = whole
    assert ends[0] == ends[2] == ("a", True), "the third token completes it and is not before min_tokens"
    assert ends[3] == ("ab", True), "begun before min_tokens, completed after"
    assert ends[4] == ends[5] == ("abca", True)
    assert ends[len(ids)] == (text, False)


def test_text_that_may_begin_a_stop_string_waits() -> None:
    detokenizer = Detokenizer(TOKEN_BYTES, ["hello!"])
    hello = TOKENIZER.encode("hello").ids
    assert detokenizer.push(hello) == Emission("", False)
    assert detokenizer.push(TOKENIZER.encode(" w").ids).text == "hello w"


def test_an_unfinished_character_is_shown_only_at_the_end() -> None:
    ids = TOKENIZER.encode("🙂").ids
    assert len(ids) == 4
    detokenizer = Detokenizer(TOKEN_BYTES)
    assert detokenizer.push(ids[:3]).text == ""
    assert detokenizer.flush() == "\ufffd"


def fallback_tokenizer(strip: bool) -> Tokenizer:
    """Text tokens with ▁ for a space and one token per byte, as sentencepiece-derived tokenizers have."""
    words = ["<unk>", "<s>", "▁he", "llo", "▁", "world", "ö", "▁▁"]
    vocabulary = {token: index for index, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<s>", special=True)])
    return tokenizer


characters = st.sampled_from(["a", "é", "漢", "🙂", "\n"]).map(lambda text: [8 + byte for byte in text.encode()])
words = st.integers(0, 7).map(lambda token_id: [token_id])


@pytest.mark.parametrize("strip", [True, False])
@given(st.lists(st.one_of(characters, words), max_size=12), st.integers(1, 4))
def test_byte_fallback_equals_decoding_everything_at_once(strip: bool, parts: list[list[int]], size: int) -> None:
    tokenizer = fallback_tokenizer(strip)
    ids = [token_id for part in parts for token_id in part]
    detokenizer = Detokenizer(TokenBytes(tokenizer))
    text = "".join(detokenizer.push(ids[start : start + size]).text for start in range(0, len(ids), size)) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.Metaspace(), None])
def test_other_decoders_are_refused_by_name(decoder: object) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.decoder = decoder
    name = type(decoder).__name__ if decoder else "None"
    with pytest.raises(ModelRefused, match=f"decoder.*{name}.*is not supported, only byte-level and byte-fallback"):
        TokenBytes(tokenizer)
