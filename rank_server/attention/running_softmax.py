"""Softmax-weighted sums over keys that come piece by piece."""

import torch
from torch import Tensor


class RunningSoftmax:
    """State of `rows` queries of each of `heads`: highest score so far, sum of exponentials, weighted sum of values; all fp32.

    A piece is added for a range of the rows; pieces may differ between rows. A row that has seen no key ends as (0, −inf).
    """

    def __init__(self, heads: int, rows: int, width: int, device: torch.device) -> None:
        self._highest = torch.full((heads, rows, 1), -torch.inf, dtype=torch.float32, device=device)
        self._sum = torch.zeros((heads, rows, 1), dtype=torch.float32, device=device)
        self._out = torch.zeros((heads, rows, width), dtype=torch.float32, device=device)

    def add(self, rows: slice, scores: Tensor, values: Tensor) -> None:
        """scores [heads, r, n], −inf where a row does not see a key, are overwritten; values [heads, n, width]; both fp32.

        Values must be finite even where nobody sees them.
        """
        highest, total, out = self._highest[:, rows], self._sum[:, rows], self._out[:, rows]
        above = torch.maximum(highest, scores.amax(-1, keepdim=True))
        finite = torch.where(above == -torch.inf, 0.0, above)
        weights = scores.sub_(finite).exp_()
        kept = (highest - finite).exp_()
        total.mul_(kept).add_(weights.sum(-1, keepdim=True))
        out.mul_(kept).baddbmm_(weights, values)
        highest.copy_(above)

    def result(self) -> tuple[Tensor, Tensor]:
        """(out [heads, rows, width], lse [heads, rows], natural log)."""
        out = self._out / torch.where(self._sum == 0, 1.0, self._sum)
        return out, (self._highest + self._sum.log()).squeeze(-1)
