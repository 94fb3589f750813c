"""Text becomes token ids and every limit is checked: work for the prompts' thread, a long prompt takes its time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from coordinator.limits import Limits, RequestRefused, completions
from coordinator.plan import Sampling
from coordinator.seeds import completion_seed
from coordinator.text import MAX_MESSAGES
from coordinator.text_errors import TextRefused
from coordinator.text_worker import Text
from cp_layout.blocks import BlockHasher
from cp_wire.errors import Internal, InvalidRequest
from cp_wire.logs import get_logger
from cp_wire.pb import coordinator_pb2

MAX_CHARS_PER_TOKEN = 256
"""Text longer than this many characters per token of max_model_len is refused untokenised."""

OPTIONAL = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_tokens",
    "top_logprobs",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "prompt_logprobs",
)
"""Fields whose absence means a default."""

LONG_CHARS, LONG_TOKENS, LONG_CHAT = 32_768, 32_768, 64
"""Characters, token ids or messages above which a prompt counts as long."""

log = get_logger("coordinator.prepare")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a request asks for, checked."""

    prompt: list[int]
    digests: tuple[list[bytes], ...]
    """Of all full hash units of the prompt, by hasher."""
    samplings: tuple[Sampling, ...]
    """Of each completion."""


def is_long(wire: coordinator_pb2.GenerateRequest) -> bool:
    """Whether preparing the prompt takes long enough (some 20 ms) to keep it away from short ones; itself takes no time."""
    kind = wire.WhichOneof("prompt")
    if kind == "text":
        return len(wire.text) > LONG_CHARS
    if kind == "tokens":
        return len(wire.tokens.ids) > LONG_TOKENS
    messages = wire.chat.messages
    return len(messages) > LONG_CHAT or sum(len(message.content) for message in messages) > LONG_CHARS


def prepare(
    wire: coordinator_pb2.GenerateRequest, text: Text, limits: Limits, seed: int, hashers: Sequence[BlockHasher]
) -> Prepared:
    """Everything about a request that takes time in proportion to its prompt.

    Raises InvalidRequest, or Internal for a fault of the text edge. Counts are looked at before anything is copied. seed: the
    request's, or the one drawn for it. The prompt is scored once, with completion 0.
    """
    try:
        count = completions(wire.n if wire.HasField("n") else None)
        prompt = _tokens(wire, text, limits)
        given = {spec.name: value for spec, value in wire.ListFields() if spec.name in OPTIONAL}
        first = limits.validate(
            prompt,
            seed=seed,
            **given,
            stop=wire.stop,
            stop_token_ids=wire.stop_token_ids,
            ignore_eos=wire.ignore_eos,
            logit_bias=wire.logit_bias,
            logprobs=wire.logprobs,
        )
    except (RequestRefused, TextRefused) as refusal:
        raise InvalidRequest(refusal.field, refusal.value, f"it must be {refusal.limit}") from None
    others = (replace(first, seed=completion_seed(seed, index), prompt_logprobs=None) for index in range(1, count))
    return Prepared(prompt, tuple(hasher.hashes(prompt) for hasher in hashers), (first, *others))


def _tokens(wire: coordinator_pb2.GenerateRequest, text: Text, limits: Limits) -> list[int]:
    kind = wire.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt", "", "it must be text, tokens or chat")
    if kind == "tokens":
        _at_most("prompt", len(wire.tokens.ids), limits.max_model_len - 1, "tokens")
        return list(wire.tokens.ids)
    longest = MAX_CHARS_PER_TOKEN * limits.max_model_len
    if kind == "text":
        _at_most(kind, len(wire.text), longest, "characters")
        return _guarded(lambda: text.encode(wire.text))
    _at_most(kind, len(wire.chat.messages), MAX_MESSAGES, "messages")
    messages = [(message.role, message.content) for message in wire.chat.messages]
    _at_most(kind, sum(len(role) + len(content) for role, content in messages), longest, "characters")
    return _guarded(lambda: text.encode_chat(messages))


def _at_most(field: str, count: int, limit: int, unit: str) -> None:
    if count > limit:
        raise InvalidRequest(field, f"{count} {unit}", f"it must have at most {limit}")


def _guarded(encode: Callable[[], list[int]]) -> list[int]:
    try:
        return encode()
    except TextRefused:
        raise
    except Exception as error:
        log.error("tokenisation failed", exc=error)
        raise Internal(f"tokenisation failed ({type(error).__name__})") from error
