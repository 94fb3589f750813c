"""Which CPUs a rank computes on."""

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rank_server.__main__ import _prepare
from rank_server.compiled.openmp import parallel
from rank_server.cores import keep_to, own_cores, take_one_each


def in_a_thread(function):
    """What the function returns in a thread of its own, with the OpenMP pool of that thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize(
    ("cpus", "ranks", "threads", "cores"),
    [
        ([0, 1], 2, 1, [(0,), (1,)]),
        ([7, 2, 5, 3], 2, 2, [(2, 3), (5, 7)]),
        (range(6), 3, 2, [(0, 1), (2, 3), (4, 5)]),
        (range(4), 2, 1, [(), ()]),
        (range(4), 4, 2, [()] * 4),
        (range(3), 2, 1, [(), ()]),
        (range(4), 1, 4, [(0, 1, 2, 3)]),
        (range(4), 1, 2, [()]),
    ],
    ids=["each one", "any numbers", "three", "cpus are left", "too few", "one is left", "alone", "alone with cpus left"],
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
        keep_to(tuple(one))
        seen.append(os.sched_getaffinity(0))
        child = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        child.start()
        child.join()

    in_a_thread(ask)
    assert seen == [one, one] and os.sched_getaffinity(0) == everywhere


def test_the_thread_that_computes_begins_with_its_cpus_and_its_number_of_threads():
    one = min(os.sched_getaffinity(0))

    def compute() -> tuple[set[int], int]:
        _prepare(1, (one,))
        return os.sched_getaffinity(0), torch.get_num_threads()

    assert in_a_thread(compute) == ({one}, 1)


def places_of_pool(threads):
    """By thread of the calling thread's OpenMP pool, the CPUs it may use."""
    places = {}

    def look(_):
        places[threading.get_native_id()] = os.sched_getaffinity(0)

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(look)
    parallel()(ctypes.cast(function, ctypes.c_void_p).value, 0, threads)
    assert len(places) == threads
    return places


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_two_threads_that_take_every_cpu_have_one_each():
    cores = tuple(sorted(os.sched_getaffinity(0))[:2])

    def compute():
        _prepare(2, cores)
        before = places_of_pool(2)
        torch.ones(1 << 20).mul_(2)  # torch computes with the same threads
        assert places_of_pool(2) == before
        return before

    places = in_a_thread(compute)
    assert sorted(places.values(), key=min) == [{core} for core in cores]
    assert os.sched_getaffinity(0) >= set(cores)


def test_threads_of_a_pool_of_three_share_their_cpus():
    cores = tuple(sorted(os.sched_getaffinity(0)))

    def compute():
        take_one_each((cores[0],) * 3)
        return places_of_pool(3)

    assert list(in_a_thread(compute).values()) == [set(cores)] * 3


def test_without_openmp_there_is_no_second_thread_to_place(monkeypatch):
    monkeypatch.setattr("rank_server.cores.parallel", lambda: None)
    everywhere = os.sched_getaffinity(0)

    def compute():
        take_one_each((min(everywhere), max(everywhere)))
        return os.sched_getaffinity(0)

    assert in_a_thread(compute) == everywhere


def test_places_that_are_refused_leave_both_threads_where_they_were(caplog):
    everywhere = os.sched_getaffinity(0)
    absent = max(everywhere) + 5000

    def compute():
        take_one_each((absent, absent))
        return places_of_pool(2)

    assert list(in_a_thread(compute).values()) == [everywhere] * 2
    assert caplog.text.count("does not keep to its own CPUs") == 2


def test_a_thread_that_may_be_anywhere_asks_for_no_place(caplog):
    everywhere = os.sched_getaffinity(0)
    keep_to(())
    assert os.sched_getaffinity(0) == everywhere and not caplog.text


def test_a_place_that_is_refused_is_no_end_of_the_thread(caplog):
    everywhere = os.sched_getaffinity(0)
    keep_to((max(everywhere) + 5000,))
    assert os.sched_getaffinity(0) == everywhere
    assert "does not keep to its own CPUs" in caplog.text
