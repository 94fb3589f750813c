"""What a generation yields, and how it is read off the wire."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cp_wire.errors import Internal
from cp_wire.pb import common_pb2, coordinator_pb2


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. A prompt with several completions counts once, the rest is summed over them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was there before the request."""
    recomputed_tokens: int
    """Tokens computed again after preemptions."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request ran."""

    ranks: tuple[int, ...]
    cp: int
    """KV shards."""
    prefill_group: tuple[int, ...]
    decode_group: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured by the client, in milliseconds; None where there were too few tokens."""

    ttft_ms: float | None
    """From sending the request to its first token."""
    tpot_ms: float | None
    """(last token − first token) / (n − 1) of completion 0."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural-log probabilities of one position, those of the raw logits."""

    sampled: float
    """Of the token that stands there."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), most likely first."""


@dataclass(frozen=True, slots=True)
class Event:
    """New tokens of one completion, log-probabilities of the prompt, or the end of the request: `finish_reason` is None on all
    events but the last."""

    request_id: str
    index: int = 0
    """Which completion the tokens belong to."""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs | None, ...] = ()
    """Of the next positions of the prompt; None for the first position, which nothing comes before."""
    finish_reason: str | None = None
    """stop, length or abort; of several completions, abort when one was aborted, else completion 0's."""
    finish_reasons: tuple[str, ...] = ()
    """One per completion, on the last event."""
    usage: Usage | None = None
    route: Route | None = None
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a prompt's completions."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer; `text`, `token_ids`, `logprobs` and `finish_reason` are those of completion 0."""

    request_id: str
    seed: int
    choices: tuple[Choice, ...]
    """All completions, in order of their index."""
    prompt_logprobs: tuple[Logprobs | None, ...]
    """One per prompt position when they were asked for; the first is None."""
    usage: Usage
    route: Route
    timing: Timing

    @property
    def text(self) -> str:
        """Text of completion 0."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of completion 0."""
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[Logprobs, ...]:
        """Log-probabilities of completion 0, one per token when they were asked for."""
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> str:
        """Why completion 0 ended."""
        return self.choices[0].finish_reason


class Reader:
    """Turns the responses of one stream into events, and checks that the stream is whole.

    Raises `Internal` when the server breaks the contract: tokens before `accepted`, anything after `finished`, or an
    end without it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._sent = clock()
        self._first = self._last = 0.0
        self._count = 0
        self._scored = 0
        self._finished = False
        self.request_id = ""
        self.seed = 0

    def read(self, response: coordinator_pb2.GenerateResponse) -> Event | None:
        """The event of a response; None for one that carries nothing for the caller."""
        kind = response.WhichOneof("event")
        if self._finished:
            raise Internal(f"the server sent {kind} after the end of the request")
        if kind == "accepted":
            self.request_id, self.seed = response.accepted.request_id, response.accepted.seed
            return None
        if kind == "tokens":
            return self._tokens(response.tokens)
        if kind == "prompt_logprobs":
            return self._prompt(response.prompt_logprobs)
        if kind == "finished":
            self._finished = True
            return self._end(response.finished)
        return None

    def end(self) -> None:
        """Call it when the stream has ended with status OK."""
        if not self._finished:
            raise Internal("the server ended the stream without a terminal event")

    def _tokens(self, tokens: coordinator_pb2.Tokens) -> Event:
        if tokens.token_ids and tokens.index == 0:
            self._last = self._clock()
            self._first = self._first if self._count else self._last
            self._count += len(tokens.token_ids)
        logprobs = tuple(_logprobs(position) for position in tokens.logprobs)
        return Event(self.request_id, tokens.index, tokens.text, tuple(tokens.token_ids), logprobs)

    def _prompt(self, piece: coordinator_pb2.PromptLogprobs) -> Event:
        if piece.start != self._scored:
            raise Internal(f"prompt log-probabilities go on at position {piece.start}, {self._scored} have come")
        self._scored += len(piece.positions)
        return Event(
            self.request_id,
            prompt_logprobs=tuple(
                _logprobs(position) if index > 0 else None for index, position in enumerate(piece.positions, piece.start)
            ),
        )

    def _end(self, finished: coordinator_pb2.Finished) -> Event:
        route = finished.route
        return Event(
            self.request_id,
            finish_reason=finished.finish_reason,
            finish_reasons=tuple(end.finish_reason for end in finished.completions) or (finished.finish_reason,),
            usage=Usage(finished.prompt_tokens, finished.completion_tokens, finished.cached_tokens, finished.recomputed_tokens),
            route=Route(tuple(route.ranks), route.cp, tuple(route.prefill_group), tuple(route.decode_group), route.reason),
            timing=Timing(
                (self._first - self._sent) * 1000 if self._count else None,
                (self._last - self._first) * 1000 / (self._count - 1) if self._count > 1 else None,
            ),
        )


def join(parts: Sequence[Event], seed: int) -> Completion:
    """The whole answer of a stream's events, of which the last is the terminal one."""
    last = parts[-1]
    assert last.finish_reason is not None and last.usage and last.route and last.timing
    return Completion(
        request_id=last.request_id,
        seed=seed,
        choices=tuple(
            _choice([event for event in parts if event.index == index], reason)
            for index, reason in enumerate(last.finish_reasons)
        ),
        prompt_logprobs=tuple(position for event in parts for position in event.prompt_logprobs),
        usage=last.usage,
        route=last.route,
        timing=last.timing,
    )


def _choice(parts: Sequence[Event], finish_reason: str) -> Choice:
    return Choice(
        text="".join(event.text for event in parts),
        token_ids=tuple(token for event in parts for token in event.token_ids),
        logprobs=tuple(position for event in parts for position in event.logprobs),
        finish_reason=finish_reason,
    )


def _logprobs(position: common_pb2.PositionLogprobs) -> Logprobs:
    return Logprobs(position.sampled, tuple((top.token_id, top.logprob) for top in position.top))
