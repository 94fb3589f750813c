"""The bytes that each token stands for, so that text can be assembled without decoding a history again."""

import json
from typing import Any

from tokenizers import Tokenizer

from model_files import ModelRefused


class TokenBytes:
    """Token id → bytes of text, for the two kinds of decoder that Llama-family tokenizers have.

    *Byte-level*: every character of a token stands for one byte. *Byte fallback*: tokens are text with ▁ for a space,
    `<0xNN>` tokens are single bytes, and one leading space of the whole output is dropped. Special tokens and ids that
    the tokenizer does not know have no text. `ModelRefused` for any other decoder.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._byte_level, self.strips_leading_space = _decoder_kind(tokenizer)
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._bytes(token_id)
        return known

    def _bytes(self, token_id: int) -> bytes:
        token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            values = [_BYTE_OF.get(character) for character in token]
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()


def _byte_characters() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 onwards, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def _decoder_kind(tokenizer: Tokenizer) -> tuple[bool, bool]:
    """(byte-level?, one leading space dropped?)."""
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return True, False
    fallback = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if steps[:3] == fallback and steps[3:] in ([], [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]):
        return False, len(steps) == 4
    raise ModelRefused(f"the tokenizer's decoder {kinds} is not supported, only byte-level and byte-fallback ones")
