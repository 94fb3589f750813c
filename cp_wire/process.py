"""The life of a server process: one event loop, signals, the parent's end, the last line on stderr."""

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import NoReturn

import uvloop

from cp_layout.errors import LayoutError
from cp_wire.errors import ConfigRefused, InvalidRequest, KvloomError

LAST_STANDARD_FD = 2

DONE, FAILED, REFUSED = 0, 1, 2
"""Exit statuses."""

_REFUSALS = (ConfigRefused, InvalidRequest, LayoutError)


def run(
    main: Callable[[], Awaitable[int]],
    *,
    refusals: tuple[type[Exception], ...] = (),
    on_second_signal: Callable[[], None] | None = None,
) -> int:
    """Runs `main` on a uvloop event loop and returns the exit status of the process.

    The first SIGINT or SIGTERM cancels `main`, which cleans up and either returns a status or lets CancelledError
    pass (status 0); the second one calls `on_second_signal` and ends the process at once with status 1. An exception
    becomes the last line on stderr, `fatal: MESSAGE`: status 2 for a refusal (ConfigRefused, InvalidRequest, LayoutError
    and `refusals`, what else the process's own packages refuse with), 1 for the rest.
    """
    _open_standard_descriptors()
    try:
        return uvloop.run(_until_signal(main, on_second_signal))
    except Exception as error:
        return report(error, refusals)


def leave(status: int) -> NoReturn:
    """Ends the process at once, with all output written but without the interpreter's own clean-up."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None: the caller has closed it
            stream.flush()
    os._exit(status)


def _open_standard_descriptors() -> None:
    """Puts /dev/null where the caller has closed stdin, stdout or stderr (`… >&-`).

    Otherwise the event loop's own files would get these numbers, which libuv takes for a fault and aborts.
    """
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= LAST_STANDARD_FD:
        os.set_inheritable(fd, True)
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


def report(error: Exception, refusals: tuple[type[Exception], ...] = ()) -> int:
    """Writes `fatal: …` for an exception that ends the process, below its traceback if it is a bug; returns the status."""
    refused = isinstance(error, (*_REFUSALS, *refusals))
    if not refused and not isinstance(error, (KvloomError, OSError)):
        traceback.print_exception(error)
    message = " ".join((str(error) or type(error).__name__).split())
    print(f"fatal: {message}", file=sys.stderr, flush=True)
    return REFUSED if refused else FAILED


async def _until_signal(main: Callable[[], Awaitable[int]], on_second_signal: Callable[[], None] | None) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main())
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            if on_second_signal is not None:
                on_second_signal()
            os._exit(FAILED)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        return await task
    except asyncio.CancelledError:
        if signals == 0:
            raise
        return DONE


def watch_stdin_eof() -> None:
    """Does what SIGTERM does when stdin ends, i.e. when the launcher that holds its other end has gone in any way.

    Only for a process that was told that stdin is such a pipe (`--exit-with-stdin`): a terminal or /dev/null says nothing
    about the parent. Call it on the event loop.
    """
    loop = asyncio.get_running_loop()
    fd = sys.stdin.fileno()

    def on_readable() -> None:
        if not os.read(fd, 4096):
            loop.remove_reader(fd)
            signal.raise_signal(signal.SIGTERM)

    loop.add_reader(fd, on_readable)
