"""Typed, bounded access to the settings of a configuration that somebody else wrote."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_files.errors import ModelRefused

MAX_JSON_BYTES = 64 << 20
"""Largest JSON document read; a sharded index of a 400-billion-parameter model has a tenth of this."""

_MAX_COUNT = 1 << 31


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; `ModelRefused` when it is too large, not JSON or not an object."""
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ModelRefused(f"{path}: {size} bytes of JSON, the limit is {MAX_JSON_BYTES}")
    return parse_json_object(path.read_bytes(), path)


def parse_json_object(data: bytes, origin: Path) -> dict[str, Any]:
    """The JSON object in `data`; `ModelRefused` naming `origin` when it is something else."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{origin}: not valid JSON ({error})") from error
    if not isinstance(document, dict):
        raise ModelRefused(f"{origin}: a JSON object is expected, found {type(document).__name__}")
    return document


class Fields:
    """Settings by name, each checked when it is read; refusals name `origin` and the setting behind `prefix`."""

    def __init__(self, values: Mapping[str, Any], origin: Path, prefix: str = "") -> None:
        self._values = values
        self._origin = origin
        self._prefix = prefix

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value; absent and null are the same."""
        value = self._values.get(name)
        return default if value is None else value

    def states(self, name: str) -> bool:
        """Whether the setting is there at all, be it null."""
        return name in self._values

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number in 1 … 2^31 − 1."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MAX_COUNT:
            raise self.refusal(name, f"= {value!r} is not a whole number between 1 and {_MAX_COUNT - 1}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._required(name, default)
        try:
            number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
        except OverflowError:  # a whole number beyond the range of floats
            number = math.inf
        if not (math.isfinite(number) and number > 0):
            raise self.refusal(name, f"= {value!r} is not a finite number above 0")
        return number

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, f"= {value!r} is not true or false")
        return value

    def token_id(self, name: str, vocab_size: int) -> int | None:
        """A token id of the vocabulary, or None when the setting is absent."""
        ids = self.token_ids(name, vocab_size)
        if len(ids) > 1:
            raise self.refusal(name, f"= {list(ids)} names more than one token")
        return ids[0] if ids else None

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them; empty when the setting is absent."""
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise self.refusal(name, f"= {token_id!r} is not a token id below {vocab_size}")
        return tuple(ids)

    def only(self, name: str, *accepted: Any) -> None:
        """Refuse a setting that is present with a value other than those computed here."""
        value = self._values.get(name)
        if value is not None and value not in accepted:
            wanted = f"only {' or '.join(map(repr, accepted))}" if accepted else "only absent or null"
            raise self.refusal(name, f"= {value!r} is not supported, {wanted}")

    def nothing_but(self, *names: str) -> None:
        """Refuse a setting of any other name, unless it is null."""
        for name, value in self._values.items():
            if value is not None and name not in names:
                raise self.refusal(name, f"= {value!r} is not supported here, only {', '.join(names)}")

    def _required(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise ModelRefused(f"{self._origin}: setting {self._prefix}{name} is missing")
        return value

    def refusal(self, name: str, what: str) -> ModelRefused:
        """The refusal of a setting: where it is, its name, then `what`."""
        return ModelRefused(f"{self._origin}: {self._prefix}{name} {what}")
