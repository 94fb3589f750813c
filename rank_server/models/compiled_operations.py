"""`Operations` on a CPU in bf16 by compiled programs: one call for what takes torch up to ten, and one rounding."""

import torch
from torch import Tensor

from rank_server.compiled import sums
from rank_server.compiled.emitter import LANES
from rank_server.models import row_programs
from rank_server.models.operations import TorchOperations


class CompiledOperations:
    """Widths that aren't multiples of LANES (for heads: halves of widths) take torch's way."""

    def __init__(self) -> None:
        self._torch = TorchOperations()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Operations`; x of any row stride."""
        if x.dim() != 2 or x.shape[1] % LANES or x.stride(1) != 1:
            return self._torch.rms_norm(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows, width = x.shape
        row_programs.rms_norm(eps)(rows, x.data_ptr(), x.stride(0) * x.itemsize, weight.data_ptr(), out.data_ptr(), width)
        return out

    def turn(
        self, heads: Tensor, num_q: int, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Operations`; results are views of heads."""
        tokens, num_heads, head_dim = heads.shape
        if head_dim % (2 * LANES) or not heads.is_contiguous():
            return self._torch.turn(heads, num_q, cos, sin, norms, eps)
        num_kv = (num_heads - num_q) // 2
        row_programs.turn_heads(None if norms is None else eps)(
            tokens,
            heads.data_ptr(),
            num_heads * head_dim * heads.itemsize,
            cos.data_ptr(),
            sin.data_ptr(),
            head_dim,
            num_q,
            num_kv,
            *((0, 0) if norms is None else (each.data_ptr() for each in norms)),
        )
        turned = num_q + num_kv
        return heads[:, :num_q], heads[:, num_q:turned], heads[:, turned:]

    def warm_up(self, eps: float, head_norms: bool) -> None:
        """See `Operations`."""
        row_programs.rms_norm(eps)
        row_programs.turn_heads(eps if head_norms else None)
        sums.program()
