"""What counts of a time in which this process was held up."""

import asyncio

import pytest

from coordinator import own_time
from coordinator.own_time import Span, stall, wait, waited


@pytest.mark.parametrize(
    ("asked_s", "took_s", "held_up_s"),
    [(0.1, 0.1, 0.0), (0.1, 0.03, 0.0), (0.125, 6.125, 6.0), (0.0, 0.5, 0.5)],
)
def test_a_wait_that_ends_late_was_held_up(asked_s, took_s, held_up_s):
    assert waited(asked_s, took_s) == Span(took_s, held_up_s)


@pytest.mark.parametrize(
    ("span", "forgiven_s", "counted_s"),
    [
        (Span(), 20.0, 0.0),
        (Span(2.0, 0.0), 20.0, 2.0),
        (Span(8.0, 6.0), 20.0, 2.0),
        (Span(8.0, 6.0), 5.0, 3.0),
        (Span(8.0, 6.0), 0.0, 8.0),
        (Span(1e9, 1e9), 20.0, 1e9 - 20.0),
    ],
)
def test_held_up_time_is_forgiven_up_to_a_limit(span, forgiven_s, counted_s):
    assert span.counted_s(forgiven_s) == counted_s


def test_spans_add_up():
    assert Span(2.0, 0.5) + Span(3.0, 1.0) == Span(5.0, 1.5)


@pytest.mark.parametrize(
    ("before", "since", "age_s", "now"),
    [
        (Span(), Span(0.5), 0.25, Span(0.25)),
        (Span(3.0, 1.0), Span(0.5), 3.5, Span(3.5, 1.0)),
        (Span(3.0, 1.0), Span(4.0, 3.5), 7.0, Span(7.0, 4.5)),
        (Span(3.0, 1.0), Span(4.0, 3.5), 2.0, Span(2.0, 2.0)),  # progress since; held up for all we know ever after
        (Span(3.0, 1.0), Span(4.0, 0.5), 2.0, Span(2.0, 0.5)),
    ],
)
def test_a_stall_goes_on_unless_there_was_progress(before, since, age_s, now):
    assert stall(before, since, age_s) == now


@pytest.mark.parametrize("answered", [True, False])
async def test_wait_measures_itself(monkeypatch, answered):
    future = asyncio.get_running_loop().create_future()
    if answered:
        future.set_result(None)
    monkeypatch.setattr(own_time, "perf_counter", iter([100.0, 107.0]).__next__)
    assert await wait(future, 0.0) == Span(7.0, 7.0)
    assert future.done() is answered, "the call goes on"


async def test_wait_ends_with_the_future():
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, None)
    assert (await wait(future, 3600.0)).held_up_s == 0.0


async def test_a_pause_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(own_time, "perf_counter", iter([0.0, 0.75]).__next__)
    assert await wait(None, 0.0) == Span(0.75, 0.75)
