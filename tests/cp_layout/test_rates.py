"""Rates out of measurements."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_layout.cost import Rates, Work, seconds
from cp_layout.rates import MAX_SURPRISE, Exchange, Link, link_of, refined, with_link

amounts = st.floats(0, 1e12)
pages = st.integers(1, 2**12).map(lambda count: count << 12)
works = st.builds(Work, *[amounts] * 7)


@given(
    st.floats(1e-6, 1e-1),
    st.floats(1e-10, 1e-6),
    st.lists(pages, min_size=2, unique=True),
)
def test_a_link_is_the_line_through_its_exchanges(latency_s: float, s_per_byte: float, sizes: list[int]) -> None:
    link = link_of([Exchange(size, latency_s + size * s_per_byte) for size in sizes])
    for size in sizes:
        assert link.latency_s + size * link.s_per_byte == pytest.approx(latency_s + size * s_per_byte, rel=1e-3, abs=3e-7)


def test_a_link_is_never_free() -> None:
    link = link_of([Exchange(100, 2e-3), Exchange(10_000, 1e-3)])  # a noisy clock
    assert link.latency_s > 0 and link.s_per_byte > 0


@pytest.mark.parametrize("exchanges", [[], [Exchange(9, 1.0)], [Exchange(9, 1.0), Exchange(9, 2.0)]])
def test_one_size_is_no_link(exchanges: list[Exchange]) -> None:
    with pytest.raises(ValueError, match="two sizes"):
        link_of(exchanges)


def test_a_measured_link_replaces_its_two_rates_only() -> None:
    rates = with_link(Rates(), Link(3.0, 4.0))
    assert (rates.round, rates.wire_byte) == (3.0, 4.0)
    assert rates == Rates()._replace(round=3.0, wire_byte=4.0)


def test_prices_converge_to_what_steps_really_take() -> None:
    """Rates that were guessed wrong by up to 8 are found from steps of all kinds, and the predictions with them."""
    draw = random.Random(5)
    truth = Rates(*(rate * 8 ** draw.uniform(-1, 1) for rate in Rates()))
    rates, units = Rates(), [0.02 / rate for rate in Rates()]

    def some_work() -> Work:
        return Work(*(unit * draw.random() ** 4 for unit in units))

    for _ in range(4000):
        work = some_work()
        rates = refined(rates, work, seconds(work, truth) * draw.uniform(0.9, 1.1))
    errors = [seconds(work, rates) / seconds(work, truth) for work in (some_work() for _ in range(200))]
    assert min(errors) > 0.8 and max(errors) < 1.25


@given(works, st.floats(-1, 1e6))
def test_rates_stay_positive_and_move_by_no_more_than_a_surprise(work: Work, measured_s: float) -> None:
    after = refined(Rates(), work, measured_s)
    for old, new in zip(Rates(), after, strict=True):
        assert old / MAX_SURPRISE <= new <= old * MAX_SURPRISE


@given(works.filter(lambda work: seconds(work, Rates()) > 0), st.floats(0.3, 3))
def test_a_prediction_moves_towards_what_was_measured(work: Work, ratio: float) -> None:
    before = seconds(work, Rates())
    after = seconds(work, refined(Rates(), work, ratio * before))
    assert after == pytest.approx(before * ratio**0.05, rel=0.02)


def test_a_step_teaches_nothing_about_what_it_does_not_use() -> None:
    work = Work(steps=1, linear_flops=1e9)
    after = refined(Rates(), work, 1.0)
    assert after[2:] == Rates()[2:]
    assert after.step > Rates().step and after.linear_flop > Rates().linear_flop


@pytest.mark.parametrize("measured_s", (0.0, -1.0))
def test_no_time_teaches_nothing(measured_s: float) -> None:
    assert refined(Rates(), Work(steps=1), measured_s) == Rates()
    assert refined(Rates(), Work(), 1.0) == Rates()
