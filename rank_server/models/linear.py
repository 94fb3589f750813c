"""Resident matrices: y = x·Wᵀ + b, and the products that a decoder fuses with it.

A matrix is held once, in row-major order; `portions` cuts it along one axis into near-equal parts, which are views of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor
from torch.nn import functional

from cp_layout.cuts import cut
from rank_server.models.compiled_linear import CompiledGated, CompiledLinear, programs, suits

Axis = Literal["rows", "columns"]
"""rows: output features of W [N, K]; columns: input features."""


class Linear(Protocol):
    """A frozen matrix W [N, K] with an optional bias [N], and x [T, K]. Results never alias inputs."""

    def __call__(self, x: Tensor) -> Tensor:
        """x·Wᵀ + b, [T, N]."""
        ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """other + x·Wᵀ + b; other [T, N]."""
        ...


class Gated(Protocol):
    """The first half of a gated FFN."""

    def __call__(self, x: Tensor) -> Tensor:
        """silu(x·Gᵀ) · x·Uᵀ, [T, N], of a gate G and a matrix U, both [N, K]."""
        ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """Any dtype and device."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return functional.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """See `Linear`."""
        return self(x).add_(other)


@dataclass(frozen=True, slots=True)
class DenseGated:
    """Any dtype and device."""

    gate: Tensor
    up: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """See `Gated`."""
        return functional.silu(functional.linear(x, self.gate), inplace=True).mul_(functional.linear(x, self.up))


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The matrix with the products that suit its dtype and device; holds the tensors as they are."""
    return CompiledLinear.of(weight, bias, programs(False)) if suits(weight) else DenseLinear(weight, bias)


def gated(gate: Tensor, up: Tensor) -> Gated:
    """The same of a gate and its matrix."""
    return CompiledGated.of(gate, up, programs(True)) if suits(gate) and suits(up) else DenseGated(gate, up)


def parts_of(weight: Tensor, axis: Axis, num_parts: int) -> Sequence[Tensor]:
    """Views of W [N, K] (or of a bias [N], by rows): part i covers `cut(size of the axis, num_parts, i)`."""
    dim = 0 if axis == "rows" else 1
    spans = (cut(weight.shape[dim], num_parts, index) for index in range(num_parts))
    return [weight.narrow(dim, first, last - first) for first, last in spans]


@dataclass(frozen=True, slots=True)
class Portions:
    """A matrix and its cut into near-equal parts along one axis."""

    whole: Linear
    parts: tuple[Linear, ...]
    """As of `parts_of`; the bias of a part is that of its rows."""


def portions(weight: Tensor, bias: Tensor | None, axis: Axis, num_parts: int) -> Portions:
    """Cuts W [N, K] into so many parts; a matrix cut by columns has no bias (ValueError)."""
    if axis == "columns" and bias is not None:
        raise ValueError("the bias of a matrix that is cut by columns would be added once per part")
    biases = [None] * num_parts if bias is None else parts_of(bias, "rows", num_parts)
    return Portions(linear(weight, bias), tuple(map(linear, parts_of(weight, axis, num_parts), biases)))
