"""The one thread that owns device, model, pool and groups."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Progress:
    """What the event loop can say about the worker without asking it."""

    running_sequence: int
    last_progress_s: float
    """Seconds since a command ended or reported progress inside."""
    commands_done: int


class Worker:
    """Runs commands in the order in which they were submitted. prepare: runs in the thread before all of them."""

    def __init__(self, prepare: Callable[[], object] = lambda: None) -> None:
        self._prepare = prepare
        self._commands: queue.SimpleQueue[tuple[int, Callable[[], Any], Future[tuple[Any, int]]] | None] = queue.SimpleQueue()
        self._running_sequence = 0
        self._last_progress = time.monotonic()
        self._commands_done = 0
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, sequence: int, command: Callable[[], Any]) -> "Future[tuple[Any, int]]":
        """Future of (result, microseconds the command took), or of the command's exception."""
        future: Future[tuple[Any, int]] = Future()
        self._commands.put((sequence, command, future))
        return future

    def touch(self) -> None:
        """Called from inside a long command: it is alive."""
        self._last_progress = time.monotonic()

    def progress(self) -> Progress:
        """A snapshot; callable from any thread, also while a command runs."""
        return Progress(self._running_sequence, time.monotonic() - self._last_progress, self._commands_done)

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the command that runs now; False when it is still busy after timeout_s."""
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._prepare()
        while (item := self._commands.get()) is not None:
            sequence, command, future = item
            if not future.set_running_or_notify_cancel():
                continue
            self.touch()
            self._running_sequence = sequence
            start = time.perf_counter_ns()
            try:
                result = command()
            except BaseException as error:  # the future carries it to whoever waits; the thread lives on
                future.set_exception(error)
            else:
                future.set_result((result, (time.perf_counter_ns() - start) // 1000))
            finally:
                self._running_sequence = 0
                self._commands_done += 1
                self.touch()
