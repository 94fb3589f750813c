"""From keyword arguments to the request on the wire; the same for both clients."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict, Unpack, cast

from google.protobuf.descriptor import FieldDescriptor

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


_SCALARS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "ignore_eos",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "model",
    "request_id",
    "cache_salt",
)
_MAX_TOKEN_ID = 2**32 - 1
_WIRE_LIMITS = {
    FieldDescriptor.CPPTYPE_INT64: "must be a whole number from -2^63 to 2^63 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "must be a whole number from 0 to 2^64 - 1",
    FieldDescriptor.CPPTYPE_DOUBLE: "must be a number",
    FieldDescriptor.CPPTYPE_BOOL: "must be True or False",
    FieldDescriptor.CPPTYPE_STRING: "must be text of valid Unicode",
}
"""What a field can carry, by its type on the wire."""


def generate_request(prompt: str | None, **options: Unpack[Options]) -> coordinator_pb2.GenerateRequest:
    """The message for exactly one of `prompt`, `token_ids`, `messages`.

    Refuses with `InvalidRequest` only what cannot be put on the wire; the server judges the rest. `TypeError` for a keyword
    that is not one of `Options`.
    """
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise TypeError(f"unknown keyword {', '.join(unknown)}: the keywords are {', '.join(Options.__annotations__)}")
    request = coordinator_pb2.GenerateRequest()
    _set_prompt(request, prompt, options.get("token_ids"), options.get("messages"))
    for name in _SCALARS:
        value = options.get(name)
        if value is not None:
            _assign(request, name, value)
    stop = options.get("stop")
    _extend(request, "stop", [stop] if isinstance(stop, str) else stop)
    _extend(request, "stop_token_ids", options.get("stop_token_ids"))
    _set_bias(request, options.get("logit_bias"))
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
        ids = _items("token_ids", token_ids, "must be a sequence of whole numbers")
        try:
            request.tokens.ids.extend(cast(list[int], ids))
        except (ValueError, TypeError):
            bad = next((token for token in ids if not _is_token_id(token)), ids)
            limit = f"must be whole numbers from 0 to vocabulary size - 1, which is at most {_MAX_TOKEN_ID}"
            raise InvalidRequest("token_ids", bad, limit) from None
    else:
        request.chat.SetInParent()
        limit = "must be a sequence of messages, each with the strings role and content"
        for message in _items("messages", messages, limit):
            try:
                request.chat.messages.add(role=message["role"], content=message["content"])  # type: ignore[index]
            except (KeyError, TypeError, ValueError):
                raise InvalidRequest("messages", message, limit) from None


def _set_bias(request: coordinator_pb2.GenerateRequest, logit_bias: Mapping[int, float] | None) -> None:
    limit = "must map token ids, which are whole numbers, to numbers"
    if not isinstance(logit_bias, Mapping | None):
        raise InvalidRequest("logit_bias", logit_bias, limit)
    for token, bias in (logit_bias or {}).items():
        try:
            request.logit_bias[token] = bias
        except (ValueError, TypeError):
            raise InvalidRequest("logit_bias", f"{token}: {bias}", limit) from None


def _assign(request: coordinator_pb2.GenerateRequest, name: str, value: object, *, shown: str | None = None) -> None:
    field = request.DESCRIPTOR.fields_by_name[name]
    try:
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL and not isinstance(value, bool):
            raise TypeError
        setattr(request, name, value)
    except (ValueError, TypeError):
        raise InvalidRequest(shown or name, value, _WIRE_LIMITS[field.cpp_type]) from None


def _extend(request: coordinator_pb2.GenerateRequest, name: str, values: object) -> None:
    if values is None:
        return
    limit = f"each {_WIRE_LIMITS[request.DESCRIPTOR.fields_by_name[name].cpp_type]}"
    items = _items(name, values, f"must be a sequence, {limit}")
    try:
        getattr(request, name).extend(items)
    except (ValueError, TypeError):
        raise InvalidRequest(name, values, limit) from None


def _items(field: str, values: object, limit: str) -> list[object]:
    if not isinstance(values, Iterable):
        raise InvalidRequest(field, values, limit)
    return list(values)


def _is_token_id(value: object) -> bool:
    try:
        return 0 <= operator.index(value) <= _MAX_TOKEN_ID  # type: ignore[arg-type]
    except TypeError:
        return False
