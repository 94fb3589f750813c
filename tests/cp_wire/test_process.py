"""The life of a process, seen from outside: statuses, last line, signals, the parent's end."""

import signal
import subprocess
import sys
import textwrap

import pytest

from cp_wire import process

HEAD = """
import asyncio, json, os, sys
from cp_wire import errors, process
from cp_layout.errors import LayoutError
"""


def start(body, **kwargs):
    """A child whose `main` has the given body; it prints `up` when it is ready for signals."""
    code = HEAD + "async def main():\n" + textwrap.indent(textwrap.dedent(body), "    ") + "\nsys.exit(process.run(main))\n"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **{"stdin": subprocess.DEVNULL, **kwargs},
    )


def last_line(text):
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("body", "status", "line", "traceback"),
    [
        ("raise LayoutError('B 3 is odd')", 2, "fatal: B 3 is odd", False),
        ("raise errors.ConfigRefused('no')", 2, "fatal: no", False),
        ("raise errors.InvalidRequest('x', 1, 'at most 0')", 2, "fatal: x is 1: at most 0", False),
        ("raise errors.Unavailable('rank 1:\\n  gone')", 1, "fatal: rank 1: gone", False),
        ("raise errors.PortInUse('h', 1)", 1, "fatal: cannot listen on h:1: the port is in use", False),
        ("raise FileNotFoundError(2, 'No such file', 'a.gguf')", 1, "fatal: [Errno 2] No such file: 'a.gguf'", False),
        ("{}['a']", 1, "fatal: 'a'", True),
        ("raise ValueError('3 is odd')", 1, "fatal: 3 is odd", True),
        ("b'\\xff'.decode()", 1, "fatal: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte", True),
        ("json.loads('{')", 1, "fatal: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)", True),
        ("raise AssertionError", 1, "fatal: AssertionError", True),
    ],
)
def test_k9_the_last_line_says_why(body, status, line, traceback):
    child = start(body)
    _, err = child.communicate(timeout=20)
    assert (child.returncode, last_line(err)) == (status, line)
    assert ("Traceback" in err) is traceback


def test_a_process_leaves_with_its_output_but_without_clean_up():
    code = "import atexit\nfrom cp_wire import process\natexit.register(print, 'late')\nprint('said')\nprocess.leave(3)"
    child = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=20, check=False)
    assert (child.returncode, child.stdout) == (3, "said\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_runs_without_the_streams_that_its_caller_has_closed(closed):
    code = HEAD + "async def main():\n    return 7\nprocess.leave(process.run(main))"
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code]
    assert subprocess.run(shell, timeout=20, check=False, capture_output=True).returncode == 7


def test_what_it_starts_finds_its_closed_streams_open():
    body = "os.execvp('sh', ['sh', '-c', 'echo lost && echo lost >&2 && cat'])"
    code = HEAD + f"async def main():\n    {body}\nprocess.run(main)"
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(shell, timeout=20, check=False, capture_output=True).returncode == 0


def test_k9_a_process_names_what_else_is_a_refusal(capsys):
    class ShelfRefused(ValueError):
        pass

    async def main():
        raise ShelfRefused("no such shelf")

    assert process.run(main, refusals=(ShelfRefused,)) == 2
    assert capsys.readouterr().err == "fatal: no such shelf\n"
    assert process.run(main) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_returned_status_is_the_exit_status():
    child = start("return 7")
    child.communicate(timeout=20)
    assert child.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_m5_a_signal_cancels_main_which_cleans_up(number):
    child = start(
        """
        print('up', flush=True)
        try:
            await asyncio.sleep(60)
        finally:
            print('cleaned', flush=True)
        """
    )
    assert child.stdout.readline() == "up\n"
    child.send_signal(number)
    out, err = child.communicate(timeout=20)
    assert (child.returncode, out, err) == (0, "cleaned\n", "")


def test_m5_the_second_signal_forces():
    child = start(
        """
        print('up', flush=True)
        try:
            await asyncio.sleep(60)
        finally:
            print('cleaning', flush=True)
            await asyncio.sleep(60)
        """
    )
    assert child.stdout.readline() == "up\n"
    child.terminate()
    assert child.stdout.readline() == "cleaning\n"
    child.terminate()
    child.communicate(timeout=20)
    assert child.returncode == 1


def test_the_end_of_the_parent_ends_the_child_and_written_bytes_do_not():
    child = start(
        """
        read, os_read = asyncio.Event(), os.read
        os.read = lambda *args: read.set() or os_read(*args)
        process.watch_stdin_eof()
        print('up', flush=True)
        await read.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        print('still here', flush=True)
        await asyncio.sleep(60)
        """,
        stdin=subprocess.PIPE,
    )
    assert child.stdout.readline() == "up\n"
    child.stdin.write("ignored\n")
    child.stdin.flush()
    assert child.stdout.readline() == "still here\n"
    child.stdin.close()
    assert child.wait(timeout=20) == 0
    child.stdout.close()
    child.stderr.close()
