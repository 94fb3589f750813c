"""Draws the next token of each row: a pure function of (logits, parameters, seed, output index)."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowSampling:
    """What one row wants."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    output_index: int
    ban: tuple[int, ...] = ()
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row got; with `error` the token is void."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    error: str | None = None


def uniform(seed: int, index: int) -> float:
    """A double in [0, 1) from (seed, index): the first 53 bits of SHA-256 over both as 64-bit little-endian integers."""
    digest = hashlib.sha256(struct.pack("<QQ", seed & (2**64 - 1), index)).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Sequence[RowSampling]) -> list[Draw]:
    """One draw per row of logits [R, V] fp32. A row whose logits are not finite gets an error, the others are not affected."""
    logprobs = torch.log_softmax(logits, dim=-1)
    return [_draw(logits[i], logprobs[i], row) for i, row in enumerate(rows)]


def _draw(logits: Tensor, logprobs: Tensor, row: RowSampling) -> Draw:
    if not bool(torch.isfinite(logits).all()):
        return Draw(0, 0.0, error="the logits are not finite")
    if row.ban:
        logits = logits.clone()
        logits[list(row.ban)] = -torch.inf
    token = int(torch.argmax(logits)) if row.temperature == 0 else _inverse_cdf(logits, row)
    top: tuple[tuple[int, float], ...] = ()
    if row.top_logprobs:
        values, ids = torch.topk(logprobs, row.top_logprobs)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Draw(token, float(logprobs[token]), top)


def _inverse_cdf(logits: Tensor, row: RowSampling) -> int:
    scaled = logits.double()
    scaled = (scaled - scaled.max()) / row.temperature
    ordered, ids = torch.sort(scaled, descending=True, stable=True)
    if row.top_k:
        ordered, ids = ordered[: row.top_k], ids[: row.top_k]
    cdf = torch.cumsum(torch.softmax(ordered, dim=0), dim=0)
    kept = len(cdf)
    if row.top_p < 1:
        kept = min(int(torch.searchsorted(cdf, row.top_p)) + 1, kept)
    target = uniform(row.seed, row.output_index) * float(cdf[kept - 1])
    index = int(torch.searchsorted(cdf[:kept], target, right=True))
    return int(ids[min(index, kept - 1)])
