"""Messages as plain data, for JSON."""

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message


def plain(message: Message) -> dict[str, Any]:
    """All fields under their names, 64-bit numbers as numbers; an enum value is its word in lower case, without the prefix."""
    return {field.name: _value(field.enum_type, getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _value(enum: Any, value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_value(enum, item) for item in value]
    if isinstance(value, Message):
        return plain(value)
    return value if enum is None else _word(enum, value)


def _word(enum: Any, number: int) -> str:
    """MERGE_A2A of an enum whose zero is MERGE_UNSPECIFIED → a2a."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    word: str = enum.values_by_number[number].name.removeprefix(prefix)
    return word.lower()
