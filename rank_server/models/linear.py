"""Resident matrices: y = x·Wᵀ + b, and the products that a decoder fuses with it.

`portions` cuts a matrix along one axis into near-equal parts. Each part is a matrix of its own and all of them together are
the whole: nothing is held twice. On a CPU with bfloat16 instructions a matrix is held in the order in which oneDNN reads it
(`PackedLinear`): products with few rows then run at the speed of memory, and with many rows at that of the arithmetic.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from cp_layout.cuts import cut

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

    def silu(self, x: Tensor) -> Tensor:
        """silu(x·Wᵀ + b)."""
        ...

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """other · (x·Wᵀ + b), element by element."""
        ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """Any dtype and device; weight and bias may be views."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return functional.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """See `Linear`."""
        return self(x).add_(other)

    def silu(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return functional.silu(self(x), inplace=True)

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """See `Linear`."""
        return self(x).mul_(other)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """bfloat16 on a CPU. What is fused with a product is computed on its fp32 sums, before they are rounded."""

    packed: Tensor
    """An opaque tensor of the mkldnn layout."""
    bias: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> "PackedLinear":
        """Copies the weight into its new order."""
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight, 1), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """See `Linear`."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.packed, self.bias, "add")

    def silu(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "swish", [], "")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """See `Linear`."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.packed, self.bias, "mul")


def packs(weight: Tensor) -> bool:
    """Whether a matrix like this is to be held packed."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _cpu_multiplies_bfloat16()


@cache
def _cpu_multiplies_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True, slots=True)
class Portions:
    """A matrix and its cut into near-equal parts along one axis."""

    whole: tuple[Linear, ...]
    """The parts, in order, that together are the matrix: one if the whole is in one place."""
    parts: tuple[Linear, ...]
    """Part i covers `cut(size of the axis, len(parts), i)`; its bias is that of its rows."""


def portions(weight: Tensor, bias: Tensor | None, axis: Axis, num_parts: int, in_place: bool = False) -> Portions:
    """Cuts W [N, K] into so many parts; a matrix cut by columns has no bias (ValueError).

    A matrix that `packs` is copied into its new order and the caller gives its own reference up. Otherwise, and with
    in_place, the parts are views of `weight`.
    """
    if axis == "columns" and bias is not None:
        raise ValueError("the bias of a matrix that is cut by columns would be added once per part")
    dense = [DenseLinear(*_slice(weight, bias, axis, num_parts, index)) for index in range(num_parts)]
    if in_place or not packs(weight):
        return Portions(whole=(DenseLinear(weight, bias),), parts=tuple(dense))
    packed = tuple(PackedLinear.of(part.weight, part.bias) if part.weight.numel() else part for part in dense)
    return Portions(whole=packed, parts=packed)


def _slice(weight: Tensor, bias: Tensor | None, axis: Axis, parts: int, index: int) -> tuple[Tensor, Tensor | None]:
    first, last = cut(weight.shape[0 if axis == "rows" else 1], parts, index)
    if axis == "columns":
        return weight[:, first:last], None
    return weight[first:last], None if bias is None else bias[first:last]
