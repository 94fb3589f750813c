"""Draws the next token of each row: a pure function of (logits, parameters, seed, output index), row by row.

Nothing here has state and no row sees another, so neither the composition of a batch, nor its order, nor the rank that draws
can change a token.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_FIRST_CANDIDATES = 1024
"""Most nuclei are smaller; only larger ones cost a sort of the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row wants its next token chosen; values are within the limits of admission."""

    temperature: float
    """0 = greedy."""
    top_p: float
    """1 = off."""
    top_k: int
    """0 = off."""
    seed: int
    """0 … 2^64 − 1."""
    output_index: int
    """Which output token of the request this draw is."""
    ban: tuple[int, ...] = ()
    """Ids that can't be drawn here."""
    top_logprobs: int = 0
    """Alternatives to report."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row got. Log-probabilities are those of the raw logits: before temperature, truncation and ban."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(id, log-probability) of the likeliest tokens, best first, ties by lowest id."""
    error: str | None = None
    """Set when this row alone failed; the other fields are void then."""


def uniform(seed: int, output_index: int) -> float:
    """A double in [0, 1), multiple of 2^−53: the first 53 bits of the first eight bytes of SHA-256(seed ‖ output index), both
    and the digest read as 64-bit little-endian integers."""
    digest = hashlib.sha256(struct.pack("<QQ", seed, output_index)).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


def sample(logits: Tensor, params: Sequence[RowSampling]) -> list[Draw]:
    """One draw per row of logits [R, V] fp32.

    Greedy rows take the largest logit, ties to the lowest id. The others scale by temperature, keep the top_k likeliest
    tokens, of those the shortest prefix of the list by (−logit, id) whose renormalised mass reaches top_p, and pick by inverse
    CDF over the kept tokens in order of id, all in float64. A row with NaN or +inf, or without a token left, gets an `error`.
    """
    return [_draw(row, wanted) for row, wanted in zip(logits, params, strict=True)]


def _draw(logits: Tensor, wanted: RowSampling) -> Draw:
    # A NaN anywhere makes the maximum NaN.
    if not math.isfinite(float(logits.max())):
        return Draw(0, 0.0, error="the logits are not finite")
    allowed = logits
    if wanted.ban:
        allowed = logits.index_fill(0, torch.tensor(wanted.ban, device=logits.device), -math.inf)
    best = int(allowed.argmax())
    if allowed[best] == -math.inf:
        return Draw(0, 0.0, error="every token is banned")
    token = best if wanted.temperature == 0 else _inverse_cdf(allowed, float(allowed[best]), wanted)
    normaliser = float(torch.logsumexp(logits.double(), 0))
    top = _likeliest(logits, wanted.top_logprobs).tolist() if wanted.top_logprobs else []
    return Draw(token, float(logits[token]) - normaliser, tuple((i, float(logits[i]) - normaliser) for i in top))


def _inverse_cdf(logits: Tensor, peak: float, wanted: RowSampling) -> int:
    # The differences are ≤ 0 and 0 at the peak, so no temperature, however small, can overflow.
    weights = ((logits.double() - peak) / wanted.temperature).exp()
    kept = _kept(logits, weights, wanted)
    cdf = (weights if kept is None else weights[kept]).cumsum(0)
    # u·total < total = cdf[−1] for every u ≤ 1 − 2^−53, and the first entry above it has a weight > 0.
    place = int(torch.searchsorted(cdf, uniform(wanted.seed, wanted.output_index) * float(cdf[-1]), right=True))
    return place if kept is None else int(kept[place])


def _kept(logits: Tensor, weights: Tensor, wanted: RowSampling) -> Tensor | None:
    """Ids that survive top_k and top_p, ascending; None = all."""
    if wanted.top_k == 0 and wanted.top_p >= 1:
        return None
    ids = _likeliest(logits, wanted.top_k or _FIRST_CANDIDATES)
    mass = weights[ids].cumsum(0)
    if wanted.top_p < 1:
        target = wanted.top_p * float(mass[-1] if wanted.top_k else weights.sum())
        if mass[-1] < target and len(ids) < len(logits):
            ids = _likeliest(logits, len(logits))
            mass = weights[ids].cumsum(0)
        ids = ids[: int(torch.searchsorted(mass, target)) + 1]
    return ids.sort().values


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """The first `count` ids of the list by (−logit, id)."""
    count = min(count, len(logits))
    threshold = logits.topk(count).values[-1]
    candidates = (logits >= threshold).nonzero().flatten()
    return candidates[logits[candidates].sort(descending=True, stable=True).indices[:count]]
