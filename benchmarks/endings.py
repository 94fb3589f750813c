"""How a benchmark is told to go: what it has started and written for the occasion goes with it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process; one that is ignored, as by nohup, stays so."""


@contextmanager
def ending_in_order() -> Iterator[None]:
    """The first signal closes what is open: Ctrl-C is KeyboardInterrupt, another one SystemExit with the status of a shell.

    From then on signals are ignored, until the end of the process: what closes has deadlines of its own. For the main thread.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in _heard()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is leave:
                signal.signal(number, handler)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Signals end the process without a word to Python: for calls that would keep a handler waiting."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in _heard()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heard() -> list[signal.Signals]:
    return [number for number in ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]
