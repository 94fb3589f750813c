"""What the end of a command looks like whatever happens: an exit status and at most one sentence, no traceback."""

from __future__ import annotations

import io
import os
import sys

from cp_client.exit_status import FAILED

TYPE_CHECKING = False
"""What `typing` has under this name; until the guard stands, Ctrl-C ends an import of it in a traceback."""
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import TypeVar

    T = TypeVar("T")


def guarded(command: Callable[[], int]) -> int:
    """The exit status of `command`, whose output has then left the process.

    Characters that stdout cannot show are written as escapes. A reader of stdout that has gone (`… | head`) ends the command
    silently with status 1; Ctrl-C and an error of the operating system end it with one sentence on stderr and status 1.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:  # None: the caller has closed it
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("kvloom: interrupted", file=sys.stderr)
    except BrokenPipeError:
        _discard_stdout()
    except OSError as error:
        _discard_stdout()
        where = f"{error.filename}: " if error.filename else ""
        print(f"kvloom: {where}{error.strerror or error}", file=sys.stderr)
    return FAILED


def interruptible(imports: Callable[[], T]) -> T:
    """What `imports` returns; Ctrl-C ends it as KeyboardInterrupt, which extension modules make an ImportError of.

    For the main thread.
    """
    import signal

    interrupted = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        return imports()
    except Exception as error:
        if interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def _discard_stdout() -> None:
    """What is buffered would fail again at the end of the interpreter, with a traceback."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
