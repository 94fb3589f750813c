"""Tokenizers from GGUF metadata: byte-level BPE, with the cuts that each family of files makes before it."""

from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from model_files.errors import ModelRefused
from model_files.gguf_header import GgufHeader

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Token types of the metadata that are matched as a whole; the rest belong to the BPE vocabulary alone."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Contractions, words, digits as the family groups them, punctuation, white space."""


@dataclass(frozen=True, slots=True)
class _Family:
    """How one `tokenizer.ggml.pre` cuts text before BPE."""

    steps: tuple[pre_tokenizers.PreTokenizer, ...]
    composes: bool = False
    """Text is brought into Unicode's composed form (NFC) first."""
    whole_words_first: bool = False
    """A word that is in the vocabulary is one token, whatever the merges say."""
    adds_bos: bool = False
    """Where the file does not say."""


def _families() -> dict[str, _Family]:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    threes = pre_tokenizers.Split(Regex(_WORDS % r"\p{N}{1,3}"), behavior="isolated")
    digits = pre_tokenizers.Split(Regex(_WORDS % r"\p{N}"), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return {
        "gpt-2": _Family((words,)),
        "smollm": _Family((pre_tokenizers.Digits(individual_digits=True), words)),
        "llama-bpe": _Family((threes, bytes_only), whole_words_first=True, adds_bos=True),
        "qwen2": _Family((digits, bytes_only), composes=True),
    }


def _family(header: GgufHeader) -> _Family:
    model, pre = header.values.get("tokenizer.ggml.model"), header.values.get("tokenizer.ggml.pre")
    families = _families()
    if model != "gpt2" or pre not in families:
        known = ", ".join(families)
        raise ModelRefused(f"{header.path}: tokenizer {model!r} with {pre!r} is not supported, only 'gpt2' with {known}")
    return families[pre]


def adds_bos(header: GgufHeader) -> bool:
    """Whether a text prompt starts with BOS: as the file says, else as its tokenizer family does."""
    stated = header.values.get("tokenizer.ggml.add_bos_token")
    return stated if isinstance(stated, bool) else _family(header).adds_bos


def build_tokenizer(header: GgufHeader, vocab_size: int) -> Tokenizer:
    """The file's tokenizer; it adds no special tokens by itself. `ModelRefused` when its metadata do not fit together."""
    family = _family(header)
    tokens = header.array("tokenizer.ggml.tokens")
    types = header.array("tokenizer.ggml.token_type")
    if not 0 < len(tokens) <= vocab_size or len(types) != len(tokens):
        raise ModelRefused(
            f"{header.path}: {len(tokens)} tokens with {len(types)} token types do not fit a vocabulary of {vocab_size}"
        )
    merges = [tuple(merge.split(" ")) for merge in header.array("tokenizer.ggml.merges")]
    for merge in merges:
        if len(merge) != 2:
            raise ModelRefused(f"{header.path}: merge {' '.join(merge)!r} is not two tokens")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=family.whole_words_first))
    except Exception as error:  # the library raises bare Exception for merges outside the vocabulary
        raise ModelRefused(f"{header.path}: the tokenizer's merges do not fit its vocabulary ({error})") from error
    if family.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(family.steps))
    tokenizer.decoder = decoders.ByteLevel()
    typed = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens([_whole(token, special=True) for token, kind in typed if kind in (_UNKNOWN, _CONTROL)])
    tokenizer.add_tokens([_whole(token, special=False) for token, kind in typed if kind == _USER_DEFINED])
    return tokenizer


def _whole(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)
