"""Merging partial attention over disjoint sets of keys.

A partial is (out, lse): softmax-weighted values over its keys, and the natural logarithm of the sum of exp(score) over them,
both fp32. A set without keys is (anything, −inf) and contributes exactly nothing. With m = max_r lse_r (0 if all are −inf):

    lse = m + log Σ exp(lse_r − m),  out = Σ exp(lse_r − lse)·out_r
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def clear_empty(out: Tensor, lse: Tensor, num_keys: Tensor) -> None:
    """Makes (out [T, h, D], lse [T, h]) of the rows with num_keys [T] = 0 exactly (0, −inf), in place.

    What a kernel leaves for a row without keys (0, NaN, +inf) is never trusted; the known number of keys decides.
    """
    empty = num_keys == 0
    if empty.any():
        out[empty] = 0
        lse[empty] = -torch.inf


def merged_lse(lses: Tensor) -> Tensor:
    """[N, *s] → [*s]: lse over the union of the keys; −inf where all are −inf."""
    highest = lses.amax(0)
    highest = torch.where(highest == -torch.inf, 0.0, highest)
    return highest + (lses - highest).exp_().sum(0).log_()


def weighted(out: Tensor, lse: Tensor, total: Tensor) -> Tensor:
    """exp(lse − total)·out, [*s, D] from out [*s, D], lse and total [*s]; exactly 0 where lse is −inf, whatever out holds."""
    empty = lse == -torch.inf
    weight = (lse - total).exp_()
    return (out * weight.unsqueeze(-1)).masked_fill_(empty.unsqueeze(-1), 0.0)


def merge_partials(outs: Tensor | Sequence[Tensor], lses: Tensor) -> tuple[Tensor, Tensor]:
    """outs [N, *s, D] (or N tensors [*s, D]) and lses [N, *s], fp32 → (out [*s, D], lse [*s]).

    Terms are added in the order given, one at a time: beside the result one buffer of its size is needed.
    """
    total = merged_lse(lses)
    merged = weighted(outs[0], lses[0], total)
    for out, lse in zip(outs[1:], lses[1:], strict=True):
        merged += weighted(out, lse, total)
    return merged, total
