"""What a request may ask for. Everything that could never be served is refused here, before anything is reserved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.plan import Sampling
from cp_layout.capacity import blocks_by_member, group_capacity_tokens
from cp_layout.interleave import Layout

DEFAULT_MAX_TOKENS = 256
MAX_INT = 2**31 - 1
"""Upper bound of max_tokens and top_k."""
MAX_SEED = 2**64 - 1
MAX_TEMPERATURE = 100.0
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROB_VALUES = 1 << 22
"""Prompt tokens × (1 + alternatives) of a request whose prompt is scored: what may wait for a slow client."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.1, 10.0
MAX_PENALTY = 2.0
"""Largest presence or frequency penalty, either sign."""
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 300
MAX_COMPLETIONS = 16
MAX_VALUE_CHARS = 64
"""Characters of a refused value that a message repeats."""


class RequestRefused(ValueError):
    """A request that can never be served: names the field, the value (shortened) and the limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        self.field = field
        self.value = shortened(value)
        self.limit = limit
        super().__init__(f"{field} is {self.value}, it must be {limit}")


def shortened(value: object) -> str:
    """The value in at most 64 characters."""
    text = str(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the cluster that a request is checked against."""

    max_model_len: int
    """Tokens of prompt and output together."""
    vocab_size: int
    layout: Layout
    blocks_per_member: int
    max_top_logprobs: int = MAX_TOP_LOGPROBS
    eos_token_ids: tuple[int, ...] = ()
    """End-of-sequence ids; they end a request unless it ignores them."""
    max_prompt: int | None = None
    """Tokens of a prompt that the ranks which compute it can hold, where they are others than those of its output."""

    def validate(
        self,
        prompt: Sequence[int],
        *,
        seed: int,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_tokens: int | None = None,
        top_logprobs: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: bool = False,
        prompt_logprobs: int | None = None,
    ) -> Sampling:
        """Sampling parameters of an acceptable request; `RequestRefused` otherwise. None = the default.

        max_tokens defaults to 256, or to what max_model_len and the pool leave beside the prompt; temperature, top_p and
        repetition_penalty to 1, the others to 0 (off). A missing seed is the caller's to draw.
        """
        self._check_prompt(prompt)
        max_tokens = self._max_tokens(len(prompt), max_tokens)
        temperature = 1.0 if temperature is None else temperature
        top_p = 1.0 if top_p is None else top_p
        if not 0 < top_p <= 1:
            raise RequestRefused("top_p", top_p, "a number above 0 and at most 1")
        _check_stop(stop)
        return Sampling(
            temperature=_number("temperature", temperature, 0, MAX_TEMPERATURE),
            top_p=top_p,
            top_k=_bounded("top_k", top_k or 0, 0, MAX_INT),
            seed=_bounded("seed", seed, 0, MAX_SEED),
            top_logprobs=_bounded("top_logprobs", top_logprobs or 0, 0, self.max_top_logprobs),
            stop_token_ids=self._stop_token_ids(stop_token_ids, ignore_eos),
            min_tokens=_bounded("min_tokens", min_tokens or 0, 0, max_tokens),
            max_tokens=max_tokens,
            min_p=_number("min_p", min_p or 0.0, 0, 1),
            repetition_penalty=_number(
                "repetition_penalty",
                1.0 if repetition_penalty is None else repetition_penalty,
                MIN_REPETITION_PENALTY,
                MAX_REPETITION_PENALTY,
            ),
            presence_penalty=_number("presence_penalty", presence_penalty or 0.0, -MAX_PENALTY, MAX_PENALTY),
            frequency_penalty=_number("frequency_penalty", frequency_penalty or 0.0, -MAX_PENALTY, MAX_PENALTY),
            logit_bias=self._logit_bias(logit_bias or {}),
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(len(prompt), prompt_logprobs),
        )

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise RequestRefused("prompt", "empty", "at least 1 token")
        if len(prompt) >= self.max_model_len:
            raise RequestRefused(
                "prompt", f"{len(prompt)} tokens", f"at most {self.max_model_len - 1} tokens (max_model_len − 1)"
            )
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            bad = next(token for token in prompt if not 0 <= token < self.vocab_size)
            raise RequestRefused("prompt token id", bad, f"from 0 to {self.vocab_size - 1}")
        capacity = group_capacity_tokens(self.layout, self.blocks_per_member)
        if self.max_prompt is not None:
            capacity = min(capacity, self.max_prompt)
        if len(prompt) > capacity:
            raise RequestRefused("prompt", f"{len(prompt)} tokens", f"at most {capacity} tokens, the size of the KV pool")

    def _max_tokens(self, prompt_len: int, max_tokens: int | None) -> int:
        """The value, or its default. The KV of the last token is never written, so the pool needs no room for it."""
        room = self.max_model_len - prompt_len
        if max_tokens is None:
            capacity = group_capacity_tokens(self.layout, self.blocks_per_member)
            return min(DEFAULT_MAX_TOKENS, room, capacity + 1 - prompt_len)
        _bounded("max_tokens", max_tokens, 1, MAX_INT)
        if max_tokens > room:
            raise RequestRefused(
                "max_tokens", max_tokens, f"at most {room} (max_model_len {self.max_model_len} − {prompt_len} prompt tokens)"
            )
        needed = max(blocks_by_member(self.layout, prompt_len + max_tokens - 1, 0))
        if needed > self.blocks_per_member:
            raise RequestRefused(
                "max_tokens",
                max_tokens,
                f"smaller: with {prompt_len} prompt tokens it needs {needed} KV blocks on a rank, the pool has "
                f"{self.blocks_per_member}",
            )
        return max_tokens

    def _stop_token_ids(self, stop_token_ids: Sequence[int], ignore_eos: bool) -> tuple[int, ...]:
        if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestRefused("stop_token_ids", f"{len(stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
        for token in stop_token_ids:
            _bounded("stop_token_ids", token, 0, self.vocab_size - 1)
        ends = (*stop_token_ids, *(() if ignore_eos else self.eos_token_ids))
        return tuple(dict.fromkeys(ends))

    def _logit_bias(self, logit_bias: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
        if len(logit_bias) > MAX_LOGIT_BIASES:
            raise RequestRefused("logit_bias", f"{len(logit_bias)} entries", f"at most {MAX_LOGIT_BIASES} entries")
        for token, bias in logit_bias.items():
            _bounded("logit_bias token id", token, 0, self.vocab_size - 1)
            _number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        return tuple(sorted(logit_bias.items()))

    def _prompt_logprobs(self, prompt_len: int, prompt_logprobs: int | None) -> int | None:
        if prompt_logprobs is None:
            return None
        _bounded("prompt_logprobs", prompt_logprobs, 0, self.max_top_logprobs)
        most = MAX_PROMPT_LOGPROB_VALUES // (1 + prompt_logprobs)
        if prompt_len > most:
            raise RequestRefused("prompt_logprobs", prompt_logprobs, f"smaller, or the prompt at most {most} tokens")
        return prompt_logprobs


def completions(n: int | None) -> int:
    """Completions that a request asks for; None = 1."""
    return _bounded("n", 1 if n is None else n, 1, MAX_COMPLETIONS)


def _number(field: str, value: float, low: float, high: float) -> float:
    """The value, if low ≤ value ≤ high; a NaN is refused."""
    if not low <= value <= high:
        raise RequestRefused(field, value, f"a number from {low:g} to {high:g}")
    return value


def _bounded(field: str, value: int, low: int, high: int) -> int:
    """The value, if low ≤ value ≤ high."""
    if not low <= value <= high:
        raise RequestRefused(field, value, f"from {low} to {high}")
    return value


def _check_stop(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestRefused("stop", f"{len(stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
    for text in stop:
        if not text:
            raise RequestRefused("stop", "an empty string", "made of strings of at least 1 character")
        if len(text) > MAX_STOP_STRING_CHARS:
            raise RequestRefused(
                "stop", repr(text[:MAX_VALUE_CHARS]), f"made of strings of at most {MAX_STOP_STRING_CHARS} characters"
            )
