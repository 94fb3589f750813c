"""The worker thread: order, errors, progress while it is busy."""

import ctypes
import threading

import pytest
import torch

from rank_server import __main__ as rank_main
from rank_server.worker import Worker

DEADLINE_S = 10.0


@pytest.fixture
def worker():
    worker = Worker()
    worker.start()
    yield worker
    worker.stop(DEADLINE_S)


def test_commands_run_in_order_on_one_thread(worker):
    seen = []
    futures = [worker.submit(i, lambda i=i: seen.append((i, threading.get_ident()))) for i in range(50)]
    for future in futures:
        future.result(DEADLINE_S)
    assert [i for i, _ in seen] == list(range(50))
    assert len({thread for _, thread in seen}) == 1


def test_h18_a_failing_command_fails_alone(worker):
    def fail():
        raise SystemExit("boom")

    failed, after = worker.submit(1, fail), worker.submit(2, lambda: 7)
    with pytest.raises(SystemExit, match="boom"):
        failed.result(DEADLINE_S)
    assert after.result(DEADLINE_S)[0] == 7


def test_progress_names_the_running_command_and_touch_resets_its_age(worker):
    started, release = threading.Event(), threading.Event()

    def block():
        started.set()
        assert release.wait(DEADLINE_S)

    future = worker.submit(5, block)
    assert started.wait(DEADLINE_S)
    before = worker.progress()
    worker.touch()
    after = worker.progress()
    assert before.running_sequence == after.running_sequence == 5
    assert after.last_progress_s <= before.last_progress_s or after.last_progress_s < 0.1
    release.set()
    future.result(DEADLINE_S)
    worker.submit(6, lambda: None).result(DEADLINE_S)
    assert worker.progress().commands_done >= 1


def test_stop_reports_a_thread_that_is_still_busy():
    worker = Worker()
    worker.start()
    started, release = threading.Event(), threading.Event()

    def block():
        started.set()
        release.wait(DEADLINE_S)

    worker.submit(1, block)
    assert started.wait(DEADLINE_S)
    assert worker.stop(0.01) is False
    release.set()
    assert worker.stop(DEADLINE_S) is True


def test_the_thread_is_prepared_before_its_first_command():
    seen = []
    worker = Worker(lambda: seen.append(threading.get_ident()))
    after = worker.submit(1, lambda: (list(seen), threading.get_ident()))
    worker.start()
    prepared, thread = after.result(DEADLINE_S)[0]
    assert prepared == [thread] != [threading.get_ident()]
    worker.stop(DEADLINE_S)


async def test_the_number_of_threads_holds_for_the_thread_that_computes(tiny, monkeypatch):
    """OpenMP has one for each thread: that of the main thread says nothing of the worker's."""

    class Seen(Exception):
        pass

    def worker(prepare):
        prepared.append(prepare)
        raise Seen

    def threads_of_a_new_thread(prepare):
        found = []

        def run():
            prepare()
            found.append(ctypes.CDLL(None).omp_get_max_threads())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(DEADLINE_S)
        return found[0]

    prepared, before = [], torch.get_num_threads()
    monkeypatch.setattr(rank_main, "Worker", worker)
    wanted = threads_of_a_new_thread(lambda: None) + 1
    words = ["--rank", "0", "--coordinator", "127.0.0.1:1", "--model", str(tiny()), "--threads-per-rank", str(wanted)]
    try:
        with pytest.raises(Seen):
            await rank_main.serve(rank_main.build_parser().parse_args(words))
        assert threads_of_a_new_thread(lambda: None) == wanted - 1
        assert threads_of_a_new_thread(prepared[0]) == wanted
    finally:
        torch.set_num_threads(before)
