"""The benchmark of collectives, as small as it gets: what it prints, not how fast anything is."""

import json
import os
import select
import signal
import subprocess
import sys

import pytest

from benchmarks import collectives
from benchmarks.member import start_member
from tests.machine import children_of

END_S = 2.0
STUCK = """
import ctypes
from benchmarks import collectives
from rank_server.collectives.gloo import GlooBackend

def stuck(*arguments):
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("opening", flush=True)
    lock(mutex)

GlooBackend.open = stuck
collectives.main(["--members", "3"])
"""
"""Member 0 opens a group for ever, as if another one never came, inside a call that no handler interrupts."""
FLAGS = ["--members", "3", "--sizes", "12,4096", "--blocks", "2", "--calls", "2"]


def run(*words: str) -> str:
    command = [sys.executable, "-m", "benchmarks.collectives", *FLAGS, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.cluster
def test_every_operation_and_size_is_compared_under_both_backends():
    document = json.loads(run("--json"))
    assert (document["benchmark"], document["members"], document["calls"]) == ("collectives", 3, 4)
    operations = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    assert [(row["op"], row["bytes"]) for row in document["rows"]] == [(op, size) for op in operations for size in (12, 4096)]
    for row in document["rows"]:
        assert 0 < row["shm_us"]["p10"] <= row["shm_us"]["median"]
        assert row["ratio"] == pytest.approx(row["shm_us"]["median"] / row["gloo_us"]["median"], rel=0.01, abs=1e-4)


@pytest.mark.cluster
@pytest.mark.sweep
def test_the_summary_has_a_line_per_operation_and_size():
    heading, *lines = run().splitlines()
    assert heading.startswith("3 members, 4 calls each")
    assert len(lines) == 8
    assert all("gloo" in line and "shm/gloo" in line for line in lines)


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_lingers_when_it_is_ended_while_groups_open(number):
    first = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "opening\n"
        others = children_of(first.pid)
        assert len(others) == 2
        waits = [os.pidfd_open(pid) for pid in others]
        first.send_signal(number)
        assert first.wait(END_S) == -number
        assert all(select.select([fd], [], [], END_S)[0] for fd in waits)
        for fd in waits:
            os.close(fd)
    finally:
        first.kill()
        first.wait(END_S)


@pytest.mark.cluster
def test_nobody_lingers_when_a_measurement_fails(monkeypatch):
    started = []
    monkeypatch.setattr(collectives, "start_member", lambda *words: started.append(start_member(*words)) or started[-1])
    monkeypatch.setattr(collectives.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(collectives, "measure", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        collectives.main(FLAGS)
    assert [other.poll() for other in started] == [-signal.SIGKILL] * 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_member_whose_parent_has_gone_does_nothing():
    command = [sys.executable, "-m", "benchmarks.member", str(os.getppid()), "benchmarks.collectives", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = f"the process {os.getppid()} that wanted benchmarks.collectives has gone\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
