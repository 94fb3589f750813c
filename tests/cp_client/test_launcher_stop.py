"""The end of a launcher process: its children end with it, however it ends."""

import os
import signal
import subprocess

import pytest

from tests.cp_client.fake_programs import COMMAND
from tests.cp_client.launched import DEADLINE_S
from tests.machine import alive, children_of, wait_gone

pytestmark = pytest.mark.cluster


class Launcher:
    """A launcher process with its three children."""

    def __init__(self, *words):
        self.process = subprocess.Popen(
            [*COMMAND, "launcher", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        line = self.process.stdout.readline()
        assert line.startswith("ready grpc="), line + self.process.stderr.read()
        self.children = children_of(self.process.pid)
        assert len(self.children) == 3

    def finish(self):
        self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_m2_a_signal_stops_everything(number):
    launcher = Launcher()
    launcher.process.send_signal(number)
    assert launcher.finish() == 0
    assert not any(map(alive, launcher.children))


def test_m2_a_stop_says_what_it_waits_for():
    launcher = Launcher("--running", "2")
    launcher.process.terminate()
    _, err = launcher.process.communicate(timeout=DEADLINE_S)
    assert "kvloom: draining 2 requests, Ctrl-C again to force the end\n" in err


def test_m2_a_frozen_rank_does_not_survive_the_stop():
    launcher = Launcher()
    os.kill(launcher.children[-1], signal.SIGSTOP)
    launcher.process.terminate()
    assert launcher.finish() == 0
    assert not any(map(alive, launcher.children))


def test_m5_a_second_signal_kills_what_is_deaf():
    launcher = Launcher("--stubborn")
    launcher.process.terminate()
    while "deaf" not in launcher.process.stderr.readline():
        assert launcher.process.poll() is None
    launcher.process.terminate()
    assert launcher.finish() == 1
    for pid in launcher.children:
        wait_gone(pid, DEADLINE_S)


def test_m1_children_notice_that_the_launcher_was_killed():
    launcher = Launcher()
    launcher.process.kill()
    launcher.finish()
    for pid in launcher.children:
        wait_gone(pid, DEADLINE_S)
