"""Token ids in, text out, one request's worth of state."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.stop_strings import StopStrings
from coordinator.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class Emission:
    """What one push produced."""

    text: str
    """Whole characters that are certain to belong to the output."""
    stopped: bool


class Detokenizer:
    """Turns a request's output tokens into text as they come.

    All texts together equal the decoded output (special tokens left out), cut before the first stop string, however the
    ids are divided into pushes. A character that spans tokens is emitted with its last byte; bytes that are no UTF-8 become
    U+FFFD. A token costs time proportional to its own length.
    """

    def __init__(self, token_bytes: TokenBytes, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """min_tokens: a stop string that is completed before the output token of this index is text like any other."""
        self._bytes = token_bytes
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = StopStrings(stop)
        self._strip_next = token_bytes.strips_leading_space

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been completed; later tokens are ignored."""
        return self._stop.stopped

    def push(self, token_ids: Sequence[int]) -> Emission:
        """Take further output tokens."""
        texts: list[str] = []
        if self.stopped:
            return Emission("", True)
        for token_id in token_ids:
            self._num_tokens += 1
            texts.append(self._take(self._bytes[token_id], final=False))
            if self.stopped:
                break
        return Emission("".join(texts), self.stopped)

    def flush(self) -> str:
        """The end of the output: text held back, and U+FFFD for a character that was never finished."""
        if self.stopped:
            return ""
        return self._take(b"", final=True) + self._stop.flush()

    def _take(self, data: bytes, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if self._strip_next and text:
            self._strip_next = False
            text = text.removeprefix(" ")
        return self._stop.feed(text, armed=self._num_tokens > self._min_tokens)
