"""One request's way back to its client."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cp_wire.errors import KvloomError
from cp_wire.pb import common_pb2

MAX_CHUNK_TOKENS = 1024
"""Tokens in one event: what waits for a slow client is merged up to this size, which keeps events below message limits."""


@dataclass(slots=True)
class Chunk:
    """Output tokens of one completion and the text that became certain with them."""

    index: int = 0
    """Which completion."""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class PromptChunk:
    """Log-probabilities of the prompt from position `start` on; position 0 has an empty entry."""

    start: int
    positions: list[common_pb2.PositionLogprobs] = field(default_factory=list)


class RequestStream:
    """Events of one request, in order: chunks, then exactly one end (the first one decided; later ones are ignored).

    The producer never waits. Chunks that the client has not taken yet are merged, completion by completion, so what is held is
    the output itself (bounded by max_tokens) and not one object per step.
    """

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.reasons: dict[int, str] = {}
        """Why each completion ended, as far as they have."""
        self._counts = [0]
        self._error: KvloomError | None = None
        self._chunks: deque[Chunk | PromptChunk] = deque()
        self._open: dict[int, Chunk] = {}
        """Per completion, its last chunk while it waits."""
        self._wake = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether the end has been decided, though perhaps not yet read."""
        return self.finish_reason is not None or self._error is not None

    @property
    def counts(self) -> Sequence[int]:
        """Output tokens of each completion."""
        return self._counts

    def expect(self, completions: int) -> None:
        """How many completions there are, 1 unless told; to be told before the first output, ignored after the end."""
        if not self.ended:
            self._counts = [0] * completions

    def put(
        self, token_ids: tuple[int, ...], text: str, logprobs: common_pb2.PositionLogprobs | None = None, index: int = 0
    ) -> None:
        """Adds output of a completion; ignored after the end."""
        if self.ended or not (token_ids or text):
            return
        chunk = self._open.get(index)
        if chunk is None or len(chunk.token_ids) >= MAX_CHUNK_TOKENS:
            chunk = self._open[index] = Chunk(index)
            self._chunks.append(chunk)
        chunk.token_ids.extend(token_ids)
        chunk.text += text
        if logprobs is not None:
            chunk.logprobs.append(logprobs)
        self._counts[index] += len(token_ids)
        self._wake.set()

    def put_prompt(self, start: int, positions: Sequence[common_pb2.PositionLogprobs]) -> None:
        """Adds log-probabilities of the prompt, in order of their positions; ignored after the end."""
        if self.ended:
            return
        for first in range(0, len(positions), MAX_CHUNK_TOKENS):
            self._chunks.append(PromptChunk(start + first, list(positions[first : first + MAX_CHUNK_TOKENS])))
        self._wake.set()

    def complete(self, index: int, reason: str) -> None:
        """A completion is whole: stop, length or abort. The last one ends the request."""
        if self.ended:
            return
        self.reasons.setdefault(index, reason)
        if len(self.reasons) == len(self._counts):
            reasons = self.reasons.values()
            self.finish("abort" if "abort" in reasons else self.reasons[0])

    def finish(self, reason: str) -> None:
        """The output is over for every completion that is not whole yet."""
        if not self.ended:
            self.finish_reason = reason
            for index in range(len(self._counts)):
                self.reasons.setdefault(index, reason)
            self._wake.set()

    def fail(self, error: KvloomError) -> None:
        """The output will never be complete; what was put before is still delivered."""
        if not self.ended:
            self._error = error
            self._wake.set()

    async def next(self) -> Chunk | PromptChunk | None:
        """The next chunk, or None once when the request has finished; raises the error it failed with."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self.finish_reason is not None:
                return None
            self._wake.clear()
            await self._wake.wait()
        chunk = self._chunks.popleft()
        if isinstance(chunk, Chunk) and self._open.get(chunk.index) is chunk:
            del self._open[chunk.index]
        return chunk
