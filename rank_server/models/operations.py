"""What a decoder does with rows between its matrices: norms, and the rotation of heads."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rank_server.models.rotary import rotate


class Operations(Protocol):
    """Row by row: no row's result depends on another."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, W] / √(mean of x² + eps) · weight [W], computed in fp32 whatever the dtype of x."""
        ...

    def turn(
        self, heads: Tensor, num_q: int, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """heads [T, hq + 2·hk, D] → q [T, hq, D], k and v [T, hk, D], q and k turned as by `rotate`, and normed before that if
        there are norms, of query and key heads, [D] each. heads is used up: results may be views of it, and it may change.
        """
        ...

    def warm_up(self, eps: float, head_norms: bool) -> None:
        """Compiles what such a model and its groups need; else it is done when needed."""
        ...


class TorchOperations:
    """`Operations` of any dtype on any device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Operations`."""
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def turn(
        self, heads: Tensor, num_q: int, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Operations`."""
        num_kv = (heads.shape[1] - num_q) // 2
        q_k, v = heads[:, : num_q + num_kv], heads[:, num_q + num_kv :]
        if norms is not None:
            of_queries, of_keys = norms
            q, k = q_k[:, :num_q], q_k[:, num_q:]
            q_k = torch.cat((self.rms_norm(q, of_queries, eps), self.rms_norm(k, of_keys, eps)), 1)
        turned = rotate(q_k, cos, sin)
        return turned[:, :num_q], turned[:, num_q:], v

    def warm_up(self, eps: float, head_norms: bool) -> None:
        """See `Operations`; there is nothing to compile."""


def operations_for(device: torch.device, dtype: torch.dtype) -> Operations:
    """The fastest ones for rows of a dtype on a device."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        from rank_server.models.compiled_operations import CompiledOperations  # it is made of these

        return CompiledOperations()
    return TorchOperations()
