"""Draws the next token of each row: a pure function of (logits, parameters, token history, seed, output index), row by row.

The order: biases are added, penalties applied, banned ids taken out, temperature, then min_p, top_k and top_p, each over what
the one before left.

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

from rank_server.logprobs import Logprobs, likeliest, logprobs_of
from rank_server.penalties import TokenHistory

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
    logprobs: bool = False
    """Whether the token's log-probability is wanted; with alternatives it always is."""
    top_logprobs: int = 0
    """Alternatives to report."""
    min_p: float = 0.0
    """0 = off."""
    bias: tuple[tuple[int, float], ...] = ()
    """(id, what is added to its logit), one per id."""
    history: TokenHistory | None = None
    """What the penalties go by; None without penalties."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row got."""

    token_id: int
    logprobs: Logprobs | None = None
    """Those of the raw logits: before biases, penalties, temperature, truncation and ban; None unless asked for."""
    error: str | None = None
    """Set when this row alone failed; the other fields are void then."""


def uniform(seed: int, output_index: int) -> float:
    """A double in [0, 1), multiple of 2^−53: the first 53 bits of the first eight bytes of SHA-256(seed ‖ output index), both
    and the digest read as 64-bit little-endian integers."""
    digest = hashlib.sha256(struct.pack("<QQ", seed, output_index)).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


def sample(logits: Tensor, params: Sequence[RowSampling]) -> list[Draw]:
    """One draw per row of logits [R, V] fp32.

    Greedy rows take the largest logit, ties to the lowest id. The others scale by temperature, keep the tokens at least min_p
    times as likely as the likeliest, of those the top_k likeliest, of those the shortest prefix of the list by (−logit, id)
    whose renormalised mass reaches top_p, and pick by inverse CDF over the kept tokens in order of id, all in float64. A row
    with NaN or +inf, or without a token left, gets an `error`.
    """
    return [_draw(row, wanted) for row, wanted in zip(logits, params, strict=True)]


def _draw(logits: Tensor, wanted: RowSampling) -> Draw:
    # A NaN anywhere makes the maximum NaN.
    if not math.isfinite(float(logits.max())):
        return Draw(0, error="the logits are not finite")
    adjusted = _adjusted(logits, wanted)
    best = int(adjusted.argmax())
    if adjusted[best] == -math.inf:
        return Draw(0, error="every token is banned")
    token = best if wanted.temperature == 0 else _inverse_cdf(adjusted, float(adjusted[best]), wanted)
    reported = wanted.logprobs or wanted.top_logprobs > 0
    return Draw(token, logprobs_of(logits, token, wanted.top_logprobs) if reported else None)


def _adjusted(logits: Tensor, wanted: RowSampling) -> Tensor:
    """Logits after biases, penalties and ban; the argument stays as it is."""
    if wanted.bias:
        ids, biases = zip(*wanted.bias, strict=True)
        where = torch.tensor(ids, device=logits.device)
        logits = logits.index_add(0, where, torch.tensor(biases, dtype=logits.dtype, device=logits.device))
    if wanted.history is not None:
        logits = wanted.history.penalised(logits)
    if wanted.ban:
        logits = logits.index_fill(0, torch.tensor(wanted.ban, device=logits.device), -math.inf)
    return logits


def _inverse_cdf(logits: Tensor, peak: float, wanted: RowSampling) -> int:
    # The differences are ≤ 0 and 0 at the peak, so no temperature, however small, can overflow.
    weights = ((logits.double() - peak) / wanted.temperature).exp()
    kept = _kept(logits, weights, wanted)
    cdf = _running_sum(weights if kept is None else weights[kept])
    # u·total < total = cdf[−1] for every u ≤ 1 − 2^−53, and the first entry above it has a weight > 0.
    place = int(torch.searchsorted(cdf, uniform(wanted.seed, wanted.output_index) * float(cdf[-1]), right=True))
    return place if kept is None else int(kept[place])


def _kept(logits: Tensor, weights: Tensor, wanted: RowSampling) -> Tensor | None:
    """Ids that survive min_p, top_k and top_p, ascending; None = all. The largest weight is 1."""
    limit = wanted.top_k
    if wanted.min_p > 0:
        # Weights fall along the list by (−logit, id), so min_p too keeps a prefix of it.
        survivors = int((weights >= wanted.min_p).sum())
        limit = min(limit or survivors, survivors)
    if limit == 0 and wanted.top_p >= 1:
        return None
    ids = likeliest(logits, limit or _FIRST_CANDIDATES)
    if wanted.top_p < 1:
        mass = _running_sum(weights[ids])
        target = wanted.top_p * float(mass[-1] if limit else weights.sum())
        if mass[-1] < target and len(ids) < len(logits):
            ids = likeliest(logits, len(logits))
            mass = _running_sum(weights[ids])
        ids = ids[: int(torch.searchsorted(mass, target)) + 1]
    return ids.sort().values


def _running_sum(weights: Tensor) -> Tensor:
    """In host memory: on a GPU the order of the additions, and with it the last bits, would be left to chance."""
    return weights.cpu().cumsum(0)
