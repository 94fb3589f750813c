"""From keyword arguments to the request on the wire; the same for both clients."""

from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

from cp_wire.channels import MAX_MESSAGE_BYTES, MIB
from cp_wire.errors import InvalidRequest
from cp_wire.pb import coordinator_pb2

UNARY_TIMEOUT_S = 10.0
GENERATE_TIMEOUT_S = 600.0
"""Default deadlines; every call has one."""

DRAIN_MARGIN_S = 5.0
"""What a drain may take beyond the deadline it was given."""


class Options(TypedDict, total=False):
    """Keywords of `generate` and `complete`; an absent one (or None) leaves the choice to the server."""

    token_ids: Sequence[int] | None
    """The prompt as token ids, instead of text."""
    messages: Sequence[Mapping[str, str]] | None
    """The prompt as chat messages with `role` and `content`, instead of text."""
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    min_tokens: int | None
    logprobs: bool
    """The log-probability of each token, also without alternatives."""
    top_logprobs: int | None
    prompt_logprobs: int | None
    """Alternatives to report with each prompt token; 0 = the prompt's own tokens alone, None = nothing."""
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    """Token id to what is added to its logit."""
    n: int | None
    """Completions of the prompt."""
    model: str | None
    request_id: str | None
    cache_salt: str | None
    """Requests share cached prefixes only within one salt."""


_NUMBERS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "min_tokens",
    "top_logprobs",
    "prompt_logprobs",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "n",
)
_STRINGS = ("model", "request_id", "cache_salt")


def generate_request(prompt: str | None, **options: Unpack[Options]) -> coordinator_pb2.GenerateRequest:
    """The message for exactly one of `prompt`, `token_ids`, `messages`.

    Refuses with `InvalidRequest` only what cannot be put on the wire; the server judges the rest.
    """
    request = coordinator_pb2.GenerateRequest(
        ignore_eos=options.get("ignore_eos", False), logprobs=options.get("logprobs", False)
    )
    _set_prompt(request, prompt, options.get("token_ids"), options.get("messages"))
    for name in (*_NUMBERS, *_STRINGS):
        value = options.get(name)
        if value is not None:
            _assign(request, name, value)
    stop = options.get("stop") or ()
    _extend(request, "stop", [stop] if isinstance(stop, str) else stop)
    _extend(request, "stop_token_ids", options.get("stop_token_ids") or ())
    _set_bias(request, options.get("logit_bias") or {})
    limit = MAX_MESSAGE_BYTES["prompt"]
    if request.ByteSize() > limit:
        raise InvalidRequest("request", f"{request.ByteSize()} bytes", f"must be at most {limit // MIB} MiB")
    return request


def _set_prompt(
    request: coordinator_pb2.GenerateRequest,
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Sequence[Mapping[str, str]] | None,
) -> None:
    given = sum(value is not None for value in (prompt, token_ids, messages))
    if given != 1:
        raise InvalidRequest("prompt", f"given {given} times", "give exactly one of prompt, token_ids and messages")
    if prompt is not None:
        _assign(request, "text", prompt, shown="prompt")
    elif token_ids is not None:
        request.tokens.SetInParent()
        try:
            request.tokens.ids.extend(token_ids)
        except (ValueError, TypeError):
            bad = next(token for token in token_ids if not isinstance(token, int) or not 0 <= token < 2**32)
            raise InvalidRequest("token_ids", bad, "must be whole numbers from 0 to vocabulary size - 1") from None
    else:
        request.chat.SetInParent()
        for message in messages or ():
            try:
                request.chat.messages.add(role=message["role"], content=message["content"])
            except (KeyError, TypeError, ValueError):
                raise InvalidRequest("messages", message, "each needs the strings role and content") from None


def _set_bias(request: coordinator_pb2.GenerateRequest, logit_bias: Mapping[int, float]) -> None:
    for token, bias in logit_bias.items():
        try:
            request.logit_bias[token] = bias
        except (ValueError, TypeError) as error:
            raise InvalidRequest("logit_bias", f"{token}: {bias}", _why(error)) from None


def _assign(request: coordinator_pb2.GenerateRequest, name: str, value: object, *, shown: str | None = None) -> None:
    try:
        setattr(request, name, value)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(shown or name, value, _why(error)) from None


def _extend(request: coordinator_pb2.GenerateRequest, name: str, values: Sequence[object]) -> None:
    try:
        getattr(request, name).extend(values)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(name, values, _why(error)) from None


def _why(error: Exception) -> str:
    return "is out of range" if "out of range" in str(error) else "is of the wrong type or not valid text"
