"""Which CPUs a rank computes on."""

import os
import threading

import pytest
import torch

from rank_server.__main__ import _prepare
from rank_server.cores import keep_to, own_cores


@pytest.mark.parametrize(
    ("cpus", "ranks", "threads", "cores"),
    [
        ([0, 1], 2, 1, [(0,), (1,)]),
        ([7, 2, 5, 3], 2, 2, [(2, 3), (5, 7)]),
        (range(6), 3, 2, [(0, 1), (2, 3), (4, 5)]),
        (range(4), 2, 1, [(), ()]),
        (range(4), 4, 2, [()] * 4),
        (range(3), 2, 1, [(), ()]),
        (range(4), 1, 4, [()]),
    ],
    ids=["each one", "any numbers", "three", "cpus are left", "too few", "one is left", "alone"],
)
def test_ranks_that_take_every_cpu_once_keep_to_their_own(cpus, ranks, threads, cores):
    assert [own_cores(cpus, rank, ranks, threads) for rank in range(ranks)] == cores


def test_ranks_of_a_second_host_count_from_its_first_cpu():
    assert [own_cores([0, 1], rank, 2, 1) for rank in (2, 3)] == [(0,), (1,)]


def test_only_the_thread_that_asks_is_kept_and_those_that_it_starts():
    everywhere = os.sched_getaffinity(0)
    one = {min(everywhere)}
    seen = []

    def ask() -> None:
        keep_to(())
        seen.append(os.sched_getaffinity(0))
        keep_to(tuple(one))
        child = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        child.start()
        child.join()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert seen == [everywhere, one] and os.sched_getaffinity(0) == everywhere


def test_the_thread_that_computes_begins_with_its_cpus_and_its_number_of_threads():
    one, seen = min(os.sched_getaffinity(0)), []

    def compute() -> None:
        _prepare(1, (one,))
        seen.append((os.sched_getaffinity(0), torch.get_num_threads()))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert seen == [({one}, 1)]


def test_a_place_that_is_refused_is_no_end_of_the_thread(caplog):
    everywhere = os.sched_getaffinity(0)
    keep_to((max(everywhere) + 5000,))
    assert os.sched_getaffinity(0) == everywhere
    assert "does not keep to its own CPUs" in caplog.text
