"""Rotary positions in the rotate-half form: dimension i of a head is paired with dimension i + D/2."""

import torch
from torch import Tensor

from cp_layout.model_shape import ModelShape


class Rotary:
    """Turns pair i of a head at position p by p·θ^(−2i/D)."""

    def __init__(self, shape: ModelShape) -> None:
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        self._frequencies = 1.0 / shape.rope_theta**exponents

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [T] int64 → (cos, signed sin), each [T, 1, D] in `dtype`; angles are computed in fp32.

        The first half of sin carries the minus sign of the rotation, so that `rotate` needs no negation.
        """
        angles = positions[:, None].to(torch.float32) * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, D] turned by the angles of its rows; cos and sin as `Rotary.at` gives them."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
