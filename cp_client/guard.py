"""What the end of a command looks like whatever happens: an exit status and at most one sentence, no traceback."""

import io
import os
import sys
from collections.abc import Callable

from cp_client.exit_status import FAILED


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


def _discard_stdout() -> None:
    """What is buffered would fail again at the end of the interpreter, with a traceback."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
