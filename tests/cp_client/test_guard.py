"""The end of a command: no traceback, whatever becomes of stdout."""

import os
import signal
import subprocess
import sys

import pytest

from cp_client.guard import guarded, interruptible
from cp_client.interpreter import PACKAGE_ROOT

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


TWICE = """import signal, sys
from cp_client.guard import guarded
def command():
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        if sys.argv[1] == "cleaning":
            signal.raise_signal(signal.SIGINT)
        print("clean")
status = guarded(command)
signal.raise_signal(signal.SIGINT)
print("ended", flush=True)
sys.exit(status)"""


@pytest.mark.parametrize(
    ("where", "heard"), [("cleaning", ("", "")), ("after it", ("clean\nended\n", "kvloom: interrupted\n"))]
)
def test_a_second_ctrl_c_is_quiet_and_ends_with_the_same_status(where, heard):
    command = [sys.executable, "-c", TWICE, where]
    done = subprocess.run(command, cwd=PACKAGE_ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (1, *heard)


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN])
def test_a_command_that_was_not_interrupted_leaves_the_handler_as_it_was(before):
    """What is ignored stays so meanwhile: a shell starts its background jobs like that."""
    signal.signal(signal.SIGINT, before)
    assert guarded(interrupted if before is signal.SIG_IGN else int) == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert interruptible(interrupted if before is signal.SIG_IGN else int) == 0
    assert signal.getsignal(signal.SIGINT) is before


WAIT = "import threading\nopen({!r}, 'w').close()\n{}"
"""A module that says that it is imported and waits to be interrupted."""
WAITING = "threading.Event().wait(60)\n"
CHANGING = "try:\n    threading.Event().wait(60)\nexcept BaseException:\n    raise ImportError('of its own') from None\n"


@pytest.mark.parametrize(("module", "how"), [("argparse", WAITING), ("numpy", WAITING), ("numpy", CHANGING)])
def test_ctrl_c_during_the_imports_of_a_command(tmp_path, module, how):
    """The command line itself imports argparse, `explain` imports numpy, which makes ImportErrors of interrupts."""
    started = tmp_path / "started"
    os.mkfifo(started)
    (tmp_path / f"{module}.py").write_text(WAIT.format(str(started), how))
    child = kvloom(*LENGTHS, PYTHONPATH=str(tmp_path))
    started.read_text()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=DEADLINE_S)
    assert (child.returncode, err) == (1, "kvloom: interrupted\n")


def test_an_import_that_fails_by_itself_is_told_as_it_is():
    def imports():
        raise ImportError("broken")

    with pytest.raises(ImportError, match="broken"):
        interruptible(imports)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nothing_is_imported_before_the_guard_stands():
    code = """import os, sys; before = set(sys.modules); import cp_client.cli
print(*sorted(set(sys.modules) - before))"""
    # Without site-packages, whose start-up files may have imported anything; of `site` itself, os is left.
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=PACKAGE_ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.split() == ["__future__", "cp_client", "cp_client.cli", "cp_client.exit_status", "cp_client.guard"]
