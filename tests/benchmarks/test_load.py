"""What benchmarks under load share: prompts, requests that are under way together, rates."""

import threading
from random import Random
from types import SimpleNamespace

import pytest

from benchmarks.load import Level, Taken, at_once, prompts, rounds


def test_a_level_is_asked_until_there_are_enough_requests():
    assert [rounds(3, concurrency) for concurrency in (1, 2, 3, 16)] == [3, 2, 1, 1]


def test_requests_are_under_way_together():
    meet = threading.Barrier(4, timeout=10)
    answers, seconds = at_once(lambda prompt, salt: (meet.wait(), prompt[0])[1], [[1], [2], [3], [4]], "")
    assert answers == [1, 2, 3, 4] and seconds > 0


def test_no_more_are_under_way_than_wanted_and_the_next_follows_as_soon_as_one_has_ended():
    """Of two places, one is held by the first request until the fifth has been sent."""
    last, under_way, most = threading.Event(), threading.Semaphore(2), []

    def ask(prompt, salt):
        most.append(under_way.acquire(blocking=False))
        if prompt == [0]:
            assert last.wait(10)
        elif prompt == [4]:
            last.set()
        under_way.release()
        return prompt[0]

    answers, _ = at_once(ask, [[number] for number in range(5)], "", 2)
    assert answers == [0, 1, 2, 3, 4] and most == [True] * 5


def test_a_request_that_fails_is_no_measurement():
    with pytest.raises(ZeroDivisionError):
        at_once(lambda prompt, salt: 1 / 0, [[1]], "")


def test_prompts_are_as_long_as_they_should_be_and_of_the_vocabulary():
    batch = list(prompts(9, 3, 40, Random(1)))
    assert [len(prompt) for prompt in batch] == [9] * 3
    assert all(0 < token < 40 for prompt in batch for token in prompt)
    assert len(set(map(tuple, batch))) == 3


def test_rates_are_tokens_over_the_whole_time():
    taken = Taken([SimpleNamespace(token_ids=[1] * 5)] * 3, seconds=2.0)
    assert (taken.output_tokens_per_s, taken.tokens_per_s(Level(95, 3))) == (7.5, 150)
