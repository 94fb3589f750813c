"""Chat templates: a model's own Jinja text, rendered in a sandbox that has a budget."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from minijinja import Environment, TemplateError

from coordinator.text_errors import TextRefused

_TEMPLATE = "chat"
_BASE_FUEL = 100_000
_FUEL_PER_MESSAGE = 1_000
"""A template of this kind spends some 25 units on a message (measured); one unit is some 20 ns."""


class ChatTemplate:
    """A compiled template.

    It sees `messages` (role, content), `add_generation_prompt` and the special tokens' texts; it can reach no file, no
    attribute, no code and no clock, and its steps and the characters it handles are charged against a budget that grows
    with the conversation. What users write is data and never a template. One charge comes late: a value printed whole is
    written before its characters are counted, so a template (the operator's choice, as the weights are) that nests lists
    exponentially can still cost much memory. Not safe for use by two threads at once.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`TextRefused` when the template does not compile."""
        self._special_tokens = dict(special_tokens)
        self._environment = Environment(
            filters={"tojson": _to_json},
            globals={"raise_exception": _raise_exception},
            trim_blocks=True,
            lstrip_blocks=True,
        )
        try:
            self._environment.add_template(_TEMPLATE, source)
        except TemplateError as error:
            raise TextRefused("chat", _first_line(error), "a chat template that compiles; send text or token ids") from error

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The prompt text for a conversation, ending where the assistant's turn begins; `TextRefused` when it fails."""
        characters = sum(len(role) + len(content) for role, content in messages)
        self._environment.fuel = _BASE_FUEL + _FUEL_PER_MESSAGE * len(messages) + characters
        try:
            return self._environment.render_template(
                _TEMPLATE,
                messages=[{"role": role, "content": content} for role, content in messages],
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except TemplateError as error:
            raise TextRefused("chat", _first_line(error), "a conversation that the model's template accepts") from error


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _to_json(value: Any, indent: int | None = None) -> str:
    """As model templates expect it: no HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _first_line(error: TemplateError) -> str:
    return str(error).split("\n", 1)[0]
