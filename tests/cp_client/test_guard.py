"""The end of a command: no traceback, whatever becomes of stdout."""

import os
import signal
import subprocess
import sys

import pytest

from cp_client.guard import guarded

DEADLINE_S = 60
GROUPS = ("explain", "groups", "--tp", "64", "--pcp", "64", "--dp", "16")
"""More than a pipe holds."""
LENGTHS = ("explain", "lengths", "--tokens", "9")


def kvloom(*words, stdout=None, **environment):
    """Its stdout is buffered, as it is for everybody who has not said otherwise."""
    command = [sys.executable, "-m", "cp_client.cli", *words]
    own = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(command, env=own | environment, stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("words", [(*GROUPS, "--json"), GROUPS, (*LENGTHS, "--json")], ids=" ".join)
def test_a_reader_that_has_gone_is_no_news(words):
    reader, writer = os.pipe()
    child = kvloom(*words, stdout=writer)
    os.close(reader)
    os.close(writer)
    _, err = child.communicate(timeout=DEADLINE_S)
    assert (child.returncode, err) == (1, "")


@pytest.mark.parametrize("words", [LENGTHS, (*LENGTHS, "--json")], ids=" ".join)
def test_a_full_disk_is_one_sentence(words):
    with open("/dev/full", "w") as full:
        child = kvloom(*words, stdout=full)
        _, err = child.communicate(timeout=DEADLINE_S)
    assert (child.returncode, err) == (1, "kvloom: No space left on device\n")


def test_what_an_ascii_terminal_cannot_show_is_escaped():
    child = kvloom(*LENGTHS, stdout=subprocess.PIPE, PYTHONIOENCODING="ascii")
    out, err = child.communicate(timeout=DEADLINE_S)
    assert (child.returncode, err) == (0, "")
    assert "\\u2588" in out


def interrupted():
    signal.raise_signal(signal.SIGINT)
    return 0


def missing():
    with open("/nonexistent/file"):
        return 0


@pytest.mark.parametrize(
    ("command", "said"),
    [(interrupted, "kvloom: interrupted\n"), (missing, "kvloom: /nonexistent/file: No such file or directory\n")],
)
def test_ends_that_are_one_sentence(command, said, capfd):
    assert guarded(command) == 1
    assert capfd.readouterr() == ("", said)


def test_ctrl_c_during_the_imports_of_a_command(tmp_path):
    """numpy, which `explain` imports, is a module that waits here."""
    started = tmp_path / "started"
    os.mkfifo(started)
    (tmp_path / "numpy.py").write_text(f"import threading\nopen({str(started)!r}, 'w').close()\nthreading.Event().wait(60)\n")
    child = kvloom(*LENGTHS, PYTHONPATH=str(tmp_path))
    started.read_text()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=DEADLINE_S)
    assert (child.returncode, err) == (1, "kvloom: interrupted\n")
