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
    """The exit status of `command`, whose output has then left the process. For the main thread.

    Characters that stdout cannot show are written as escapes. A reader of stdout that has gone (`… | head`) ends the command
    silently with status 1; Ctrl-C and an error of the operating system end it with one sentence on stderr and status 1. Another
    Ctrl-C ends the process at once with status 1, and no more is said.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    interrupts = _Interrupts()
    try:
        interrupts.watch()
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
    finally:
        interrupts.unwatch()
    return FAILED


class _Interrupts:
    """Ctrl-C while a command runs: KeyboardInterrupt, then the end of the process. Where it is ignored it stays so."""

    def __init__(self) -> None:
        self._before: object = None
        self._come = False

    def watch(self) -> None:
        import signal

        self._before = signal.getsignal(signal.SIGINT)
        if callable(self._before):
            signal.signal(signal.SIGINT, self._on_interrupt)

    def unwatch(self) -> None:
        import signal

        if self._come:
            # What is left is the end of the interpreter, which would answer with a traceback or another status.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        elif callable(self._before) and signal.getsignal(signal.SIGINT) == self._on_interrupt:
            signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._come:
            os._exit(FAILED)
        self._come = True
        raise KeyboardInterrupt


def interruptible(imports: Callable[[], T]) -> T:
    """What `imports` returns; Ctrl-C ends it as KeyboardInterrupt, which extension modules make an ImportError of.

    For the main thread.
    """
    import signal

    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        return imports()
    interrupted = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        before(number, frame)

    signal.signal(signal.SIGINT, on_interrupt)
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
