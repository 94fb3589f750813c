"""Log-probabilities of raw logits: what a position says about the token that stands there, and about its alternatives."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SLICE_BYTES = 32 << 20
"""Bound on the fp32 logits that are in memory at once while a prompt is scored; at least one row is."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms, computed in float64."""

    of_token: float
    top: tuple[tuple[int, float], ...] = ()
    """(id, log-probability) of the likeliest tokens, best first, ties by lowest id."""


def likeliest(logits: Tensor, count: int) -> Tensor:
    """The first `count` ids of the list by (−logit, id); logits [V]."""
    count = min(count, len(logits))
    threshold = logits.topk(count).values[-1]
    candidates = (logits >= threshold).nonzero().flatten()
    return candidates[logits[candidates].sort(descending=True, stable=True).indices[:count]]


def logprobs_of(logits: Tensor, token: int, top: int) -> Logprobs:
    """One position: logits [V] fp32, the token that stands there, and how many alternatives to report."""
    normaliser = float(torch.logsumexp(logits.double(), 0))
    best = likeliest(logits, top).tolist() if top else []
    return Logprobs(float(logits[token]) - normaliser, tuple((i, float(logits[i]) - normaliser) for i in best))


def rows_per_slice(vocab_size: int) -> int:
    """Rows whose logits are computed at once; a function of the model alone, so all members take part in the same slices."""
    return max(1, SLICE_BYTES // (4 * vocab_size))


def score(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[Logprobs | None]:
    """Positions of prompts: logits [R, V] fp32, the token that stands at each, alternatives to report for each.

    None where the logits are no distribution: NaN, +inf, or nothing but −inf.
    """
    fine = torch.isfinite(logits.max(1).values).tolist()
    return [
        logprobs_of(row, token, top) if is_fine else None
        for row, token, top, is_fine in zip(logits, tokens, tops, fine, strict=True)
    ]
