"""Rates of the cost model out of measurements: a link from timed exchanges, all rates from the times of steps."""

from collections.abc import Sequence
from typing import NamedTuple

from cp_layout.cost import Rates, Work, seconds

LEAST_S = 1e-7
"""No exchange is faster than this, however the clock was read."""

MAX_SURPRISE = 4.0
"""A step that took more than so many times what was predicted, or less than that part of it, counts as if just so many."""


class Link(NamedTuple):
    """A group's exchanges: seconds ≈ latency + received bytes · per_byte."""

    latency_s: float
    s_per_byte: float


class Exchange(NamedTuple):
    """One timed size of an all-gather."""

    received_bytes: int
    """By every member, its own part not counted."""
    seconds: float


def link_of(exchanges: Sequence[Exchange]) -> Link:
    """The line through the smallest and the largest exchange, neither part of it below what a clock can tell.

    `ValueError` with fewer than two sizes.
    """
    small, large = min(exchanges, default=None), max(exchanges, default=None)
    if small is None or large is None or small.received_bytes == large.received_bytes:
        raise ValueError(f"a link takes two sizes of exchanges, got {len(exchanges)} of the same")
    more_bytes = large.received_bytes - small.received_bytes
    s_per_byte = max(large.seconds - small.seconds, LEAST_S) / more_bytes
    return Link(max(small.seconds - small.received_bytes * s_per_byte, LEAST_S), s_per_byte)


def with_link(rates: Rates, link: Link) -> Rates:
    """The rates with a measured link."""
    return rates._replace(round=link.latency_s, wire_byte=link.s_per_byte)


def refined(rates: Rates, work: Work, measured_s: float, weight: float = 0.05) -> Rates:
    """An exponential moving average in the logarithm: the prediction of this work moves by `weight` towards what was measured.

    Every rate moves by its part in the prediction, so a step teaches nothing about what it hardly used. Rates stay positive.
    A time that is not above 0 teaches nothing.
    """
    predicted = seconds(work, rates)
    if not (predicted > 0 and measured_s > 0):
        return rates
    ratio = min(max(measured_s / predicted, 1 / MAX_SURPRISE), MAX_SURPRISE)
    shares = [amount * rate / predicted for amount, rate in zip(work, rates, strict=True)]
    scale = weight / sum(share * share for share in shares)
    return Rates(*(rate * ratio ** (scale * share) for rate, share in zip(rates, shares, strict=True)))
