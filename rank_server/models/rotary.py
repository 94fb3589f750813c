"""Rotary positions in the rotate-half form: dimension i of a head is paired with dimension i + D/2.

The frequencies are computed in fp32 in the order of operations of the reference implementation: at position 10^5 a relative
error of 10^-7 in a frequency is one of 0.01 in the angle.
"""

import math

import torch
from torch import Tensor

from cp_layout.model_shape import LinearRope, Llama3Rope, ModelShape, YarnRope


class Rotary:
    """Turns pair i of a head at position p by p times its frequency."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._frequencies = frequencies(shape).to(device)
        self._magnitude = shape.rope_scaling.attention_factor if isinstance(shape.rope_scaling, YarnRope) else 1.0

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [T] int64 → (cos, signed sin), each [T, 1, D] in `dtype`; angles are computed in fp32.

        The first half of sin carries the minus sign of the rotation, so that `rotate` needs no negation. Both carry YaRN's
        attention factor.
        """
        angles = positions[:, None].to(torch.float32) * self._frequencies
        cos, sin = angles.cos() * self._magnitude, angles.sin() * self._magnitude
        return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]


def frequencies(shape: ModelShape) -> Tensor:
    """[D/2] fp32 in host memory, the same on every device: θ^(−2i/D) for pair i, stretched as the shape says."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device="cpu") / shape.head_dim
    powers = shape.rope_theta**exponents
    match shape.rope_scaling:
        case None:
            return 1.0 / powers
        case LinearRope(factor):
            return 1.0 / powers / factor
        case Llama3Rope() as scaling:
            return _llama3(1.0 / powers, scaling)
        case YarnRope() as scaling:
            return _yarn(powers, shape.rope_theta, scaling)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, D] turned by the angles of its rows; cos and sin as `Rotary.at` gives them."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same for heads [T, heads, D] whose pairs are dimensions 2i and 2i + 1; they come out as `rotate`'s, i and i + D/2."""
    return rotate(torch.cat((x[..., 0::2], x[..., 1::2]), -1), cos, sin)


def _llama3(plain: Tensor, scaling: Llama3Rope) -> Tensor:
    """Llama 3.1's rule: by wavelength, in tokens, against two bounds set by the original context."""
    wavelengths = 2 * math.pi / plain
    slowest = scaling.original_max_position / scaling.low_freq_factor
    fastest = scaling.original_max_position / scaling.high_freq_factor
    turns = scaling.original_max_position / wavelengths
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - kept) * plain / scaling.factor + kept * plain
    return torch.where(wavelengths > slowest, plain / scaling.factor, torch.where(wavelengths < fastest, plain, blended))


def _yarn(powers: Tensor, theta: float, scaling: YarnRope) -> Tensor:
    """YaRN (Peng et al., 2023): a ramp over the dimensions, between two numbers of turns in the original context."""
    dims = 2 * len(powers)

    def dimension(turns: float) -> float:
        return dims * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    if first == last:
        last += 0.001  # a step rather than 0/0
    ramp = ((torch.arange(len(powers), dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept
