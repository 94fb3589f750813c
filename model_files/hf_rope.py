"""Rotary positions as config.json describes them, in both spellings: `rope_parameters`, or `rope_theta` and `rope_scaling`.

Defaults and the attention factor follow the reference implementation; what it would silently ignore is refused.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from cp_layout.model_shape import LinearRope, Llama3Rope, RopeScaling, YarnRope
from model_files.errors import ModelRefused
from model_files.fields import Fields

DEFAULT_THETA = 10000.0
_ALWAYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def rope_from_config(fields: Fields, origin: Path, max_position: int) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of the rotary positions of a model of `max_position` positions.

    `ModelRefused` names a type that is unknown, a setting that its type does not have, or one out of bounds.
    """
    name, rope = _stated(fields, origin)
    fields.only("partial_rotary_factor", 1)
    rope.only("partial_rotary_factor", 1)
    theta = rope.real("rope_theta", fields.real("rope_theta", DEFAULT_THETA))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        rope.nothing_but(*_ALWAYS)
        return theta, None
    if not isinstance(kind, str) or kind not in _READERS:
        raise ModelRefused(f"{origin}: {name} of type {kind!r} is not supported, only default, {', '.join(_READERS)}")
    settings, read = _READERS[kind]
    rope.nothing_but(*_ALWAYS, *settings)
    # A length beside the rotary settings outranks the one among them.
    inside = rope.count("original_max_position_embeddings", max_position)
    original = fields.count("original_max_position_embeddings", inside)
    if kind == "yarn" and theta <= 1:
        raise ModelRefused(f"{origin}: rope_theta = {theta} is not above 1, rotary positions of type 'yarn' need that")
    return theta, read(rope, original, max_position)


def yarn_score_factor(fields: Fields, origin: Path) -> float:
    """What latent attention multiplies its scores by: (0.1·mscale_all_dim·ln(factor) + 1)² for YaRN, 1 otherwise."""
    _, rope = _stated(fields, origin)
    if rope.get("rope_type", rope.get("type")) != "yarn" or rope.get("mscale_all_dim") is None:
        return 1.0
    return _magnitude(rope.real("factor"), rope.real("mscale_all_dim")) ** 2


def _stated(fields: Fields, origin: Path) -> tuple[str, Fields]:
    """The object with the rotary settings, by whichever name it is there."""
    given = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.get(name, {})
        if not isinstance(value, dict):
            raise ModelRefused(f"{origin}: {name} = {value!r} is not an object")
        if value:
            given[name] = value
    if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        raise ModelRefused(f"{origin}: rope_parameters and rope_scaling are both there and differ")
    name, value = next(iter(given.items()), ("rope_parameters", {}))
    return name, Fields(value, origin, f"{name}.")


def _linear(rope: Fields, original: int, max_position: int) -> LinearRope:
    return LinearRope(rope.real("factor"))


def _llama3(rope: Fields, original: int, max_position: int) -> Llama3Rope:
    scaling = Llama3Rope(
        factor=rope.real("factor"),
        original_max_position=original,
        low_freq_factor=rope.real("low_freq_factor"),
        high_freq_factor=rope.real("high_freq_factor"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.refusal(
            "high_freq_factor", f"= {scaling.high_freq_factor} is not above {scaling.low_freq_factor}, the low one"
        )
    return scaling


def _yarn(rope: Fields, original: int, max_position: int) -> YarnRope:
    factor = rope.real("factor", max_position / original)
    scaling = YarnRope(
        factor=factor,
        original_max_position=original,
        beta_fast=rope.real("beta_fast", 32.0),
        beta_slow=rope.real("beta_slow", 1.0),
        attention_factor=rope.real("attention_factor", _yarn_magnitude(rope, factor)),
        truncate=rope.flag("truncate", True),
    )
    if scaling.beta_fast < scaling.beta_slow:
        raise rope.refusal("beta_fast", f"= {scaling.beta_fast} is below beta_slow = {scaling.beta_slow}")
    return scaling


def _yarn_magnitude(rope: Fields, factor: float) -> float:
    """YaRN's 0.1·ln(factor) + 1; the quotient of two such terms where the file weighs them by `mscale` and `mscale_all_dim`."""

    if rope.get("mscale") is None or rope.get("mscale_all_dim") is None:
        return _magnitude(factor, 1.0)
    return _magnitude(factor, rope.real("mscale")) / _magnitude(factor, rope.real("mscale_all_dim"))


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


_Reader = Callable[[Fields, int, int], RopeScaling]

_READERS: Mapping[str, tuple[tuple[str, ...], _Reader]] = {
    "linear": (("factor",), _linear),
    "llama3": (("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), _llama3),
    "yarn": (
        (
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
        _yarn,
    ),
}
"""Type → the settings it has, and what reads them: (settings, original positions, positions)."""
