"""Merging partial attention over disjoint sets of keys.

A partial is (out, lse): softmax-weighted values over its keys, and the natural logarithm of the sum of exp(score) over them,
both fp32. A set without keys is (anything, −inf) and contributes exactly nothing. With m = max_r lse_r (0 if all are −inf):

    lse = m + log Σ exp(lse_r − m),  out = Σ exp(lse_r − m)·out_r / Σ exp(lse_r − m)

The weights are normalised by their own sum instead of being taken as exp(lse_r − lse): they then add up to 1 even where lse is
so large that its fp32 rounding would show.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rank_server.attention import merge_program


def clear_empty(out: Tensor, lse: Tensor, num_keys: Tensor) -> None:
    """Makes (out [T, h, D], lse [T, h]) of the rows with num_keys [T] = 0 exactly (0, −inf), in place.

    What a kernel leaves for a row without keys (0, NaN, +inf) is never trusted; the known number of keys decides.
    """
    empty = num_keys == 0
    if empty.any():
        out[empty] = 0
        lse[empty] = -torch.inf


def shares(lses: Tensor) -> tuple[Tensor, Tensor]:
    """lses [N, *s] → (share of each set in the softmax over their union [N, *s], lse over the union [*s]).

    The share of an empty set is exactly 0; where all are empty, lse is −inf.
    """
    highest = lses.amax(0)
    highest = torch.where(highest == -torch.inf, 0.0, highest)
    weights = (lses - highest).exp_()
    sums = weights.sum(0)
    lse = highest + sums.log()
    return weights.div_(torch.where(sums == 0, 1.0, sums)), lse


def scaled(out: Tensor, share: Tensor) -> Tensor:
    """share·out, [*s, D] from out [*s, D] and share [*s]; exactly 0 where share is 0, whatever out holds."""
    return (out * share.unsqueeze(-1)).masked_fill_((share == 0).unsqueeze(-1), 0.0)


def merge_partials(outs: Tensor | Sequence[Tensor], lses: Tensor) -> tuple[Tensor, Tensor]:
    """outs [N, *s, D] (or N tensors [*s, D]) and lses [N, *s], fp32 → (out [*s, D], lse [*s]).

    Terms are added in the order given, one at a time: beside the result one buffer of its size is needed.
    """
    if lses.is_cpu and (found := merge_program.merge(outs, lses)) is not None:
        return found
    weights, lse = shares(lses)
    merged = scaled(outs[0], weights[0])
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        merged += scaled(out, weight)
    return merged, lse


class OnlineMerge:
    """The merge of partials that arrive one at a time; nothing is kept of a partial but its share.

    shape: [t, h, D] of out; result() is (0, −inf) until something is added.
    """

    def __init__(self, shape: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._shape, self._device = tuple(shape), device
        self._merged: tuple[Tensor, Tensor] | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Takes in attention (out [t, h, D], lse [t, h], fp32) over keys of no other partial; lse must not change later."""
        if self._merged is None:
            self._merged = out.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0), lse
        else:
            before, before_lse = self._merged
            self._merged = merge_partials([before, out], torch.stack([before_lse, lse]))

    def result(self) -> tuple[Tensor, Tensor]:
        """(out [t, h, D], lse [t, h]) over all keys so far."""
        if self._merged is None:
            return torch.zeros(self._shape, device=self._device), torch.full(self._shape[:-1], -torch.inf, device=self._device)
        return self._merged


def merge_packed(packed: Tensor) -> Tensor:
    """packed [N, *s, D + 1], fp32, out‖lse of each row → out [*s, D], as `merge_partials` gives it."""
    if packed.is_cpu and (found := merge_program.merge_packed(packed)) is not None:
        return found
    return merge_partials(packed[..., :-1], packed[..., -1])[0]
