"""A benchmark that is told to go: what it has written and started goes with it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.endings import ENDINGS, ending_at_once, ending_in_order
from benchmarks.harness import run_benchmark
from benchmarks.load import at_once
from cp_client.interpreter import PACKAGE_ROOT

DEADLINE_S = 30

MODEL = """import contextlib, sys, tempfile, threading
from benchmarks.harness import run_benchmark

@contextlib.contextmanager
def slow():
    try:
        yield
    finally:
        print("closing", flush=True)
        sys.stdin.readline()
        print("closed", flush=True)

def main():
    with tempfile.TemporaryDirectory() as directory, slow():
        open(directory + "/weights", "w").close()
        print("written", flush=True)
        threading.Event().wait(60)

sys.exit(run_benchmark(main))"""


@pytest.mark.parametrize("number", ENDINGS, ids=lambda number: number.name)
def test_a_signal_leaves_no_model_behind_and_another_one_is_no_news(number, tmp_path):
    pipe, environment = subprocess.PIPE, {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", MODEL]
    with subprocess.Popen(
        command, cwd=PACKAGE_ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout.readline() == "written\n"
        assert list(tmp_path.glob("*/weights"))
        process.send_signal(number)
        assert process.stdout.readline() == "closing\n"
        for other in ENDINGS:
            process.send_signal(other)
        out, err = process.communicate("\n", timeout=DEADLINE_S)
    assert (out, list(tmp_path.iterdir())) == ("closed\n", [])
    interrupted = (1, "kvloom: interrupted\n")
    assert (process.returncode, err) == (interrupted if number == signal.SIGINT else (128 + number, ""))


def handlers():
    return [signal.getsignal(number) for number in ENDINGS]


def test_signals_mean_again_what_they_did_when_a_benchmark_has_ended():
    before = handlers()
    within = []
    assert run_benchmark(lambda: within.append(handlers()) or 0) == 0
    assert handlers() == before and not set(within[0]) & set(before)


def test_a_call_that_cannot_be_told_is_ended_at_once():
    with ending_in_order():
        before = handlers()
        with ending_at_once():
            assert handlers() == [signal.SIG_DFL] * 3
        assert handlers() == before


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        for ending in (ending_in_order, ending_at_once):
            with ending():
                assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_requests_under_way_keep_nobody_who_is_told_to_go():
    asked, answer, ended = threading.Semaphore(0), threading.Event(), []

    def ask(prompt, salt):
        asked.release()
        ended.append(answer.wait(DEADLINE_S))

    def go():
        with ending_in_order():
            for _ in range(2):
                assert asked.acquire(timeout=DEADLINE_S)
            signal.raise_signal(signal.SIGTERM)

    class Batch(list):
        """Is asked for its length first, and told to go when all has been sent."""

        def __iter__(self):
            yield from super().__iter__()
            go()

    before = handlers()
    try:
        with pytest.raises(SystemExit) as stopped:
            at_once(ask, Batch([[1], [2]]), "")
        assert (stopped.value.code, ended) == (128 + signal.SIGTERM, [])
    finally:
        answer.set()
        for number, handler in zip(ENDINGS, before, strict=True):
            signal.signal(number, handler)


def test_every_benchmark_is_run_so():
    sources = [path.read_text() for path in (Path(PACKAGE_ROOT) / "benchmarks").glob("*.py")]
    programs = [source for source in sources if "\ndef main(" in source]
    assert programs and all(source.endswith("\n    sys.exit(run_benchmark(main))\n") for source in programs)
