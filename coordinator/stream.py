"""One request's way back to its client."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from cp_wire.errors import KvloomError
from cp_wire.pb import common_pb2

MAX_CHUNK_TOKENS = 1024
"""Tokens in one event: what waits for a slow client is merged up to this size, which keeps events below message limits."""


@dataclass(slots=True)
class Chunk:
    """Output tokens and the text that became certain with them."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)


class RequestStream:
    """Events of one request, in order: chunks, then exactly one end (the first of `finish` and `fail`; later ones are ignored).

    The producer never waits. Chunks that the client has not taken yet are merged, so what is held is the output itself
    (bounded by max_tokens) and not one object per step.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._error: KvloomError | None = None
        self._chunks: deque[Chunk] = deque()
        self._wake = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether the end has been decided, though perhaps not yet read."""
        return self.finish_reason is not None or self._error is not None

    def put(self, token_ids: tuple[int, ...], text: str, logprobs: common_pb2.PositionLogprobs | None = None) -> None:
        """Adds output; ignored after the end."""
        if self.ended or not (token_ids or text):
            return
        if not self._chunks or len(self._chunks[-1].token_ids) >= MAX_CHUNK_TOKENS:
            self._chunks.append(Chunk())
        chunk = self._chunks[-1]
        chunk.token_ids.extend(token_ids)
        chunk.text += text
        if logprobs is not None:
            chunk.logprobs.append(logprobs)
        self.num_tokens += len(token_ids)
        self._wake.set()

    def finish(self, reason: str) -> None:
        """The output is complete: stop, length or abort."""
        if not self.ended:
            self.finish_reason = reason
            self._wake.set()

    def fail(self, error: KvloomError) -> None:
        """The output will never be complete; what was put before is still delivered."""
        if not self.ended:
            self._error = error
            self._wake.set()

    async def next(self) -> Chunk | None:
        """The next chunk, or None once when the request has finished; raises the error it failed with."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self.finish_reason is not None:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._chunks.popleft()
