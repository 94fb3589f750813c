"""Output on its way through the text thread, step by step."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from coordinator.text_rows import LiveRequest, TextResult, TextRow
from coordinator.text_worker import TextWorker
from cp_wire.logs import get_logger

log = get_logger("coordinator.text_backlog")


class TextBacklog:
    """What has been handed to the text thread and is not out yet.

    deliver: takes each result, on the event loop, in the order of submission. break_off: called for a request whose output is
    lost. stuck: called when the oldest step has taken `text_s`; all of them are given up. news: called after each step.
    """

    def __init__(
        self,
        text: TextWorker,
        text_s: float,
        deliver: Callable[[TextResult], None],
        break_off: Callable[[LiveRequest, Exception], None],
        stuck: Callable[[], None],
        news: Callable[[], None],
    ) -> None:
        self._text = text
        self._text_s = text_s
        self._deliver_one = deliver
        self._break_off = break_off
        self._stuck = stuck
        self._news = news
        self._steps: deque[asyncio.Future[None]] = deque()
        self._deadline: asyncio.TimerHandle | None = None
        """Of the oldest step, in every state of the set."""

    def __len__(self) -> int:
        return len(self._steps)

    def submit(self, rows: Sequence[TextRow]) -> None:
        """Hands over what a step brought."""
        delivered = self._text.submit(rows, self._deliver)
        self._steps.append(delivered)
        if len(self._steps) == 1:
            self._watch()
        delivered.add_done_callback(lambda delivered: self._delivered(delivered, rows))

    def _watch(self) -> None:
        """Gives what is now the oldest text its time."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._steps:
            self._deadline = asyncio.get_running_loop().call_later(self._text_s, self._give_up)

    def _give_up(self) -> None:
        log.error("text is stuck", steps=len(self._steps))
        self._steps.clear()
        self._stuck()

    def _deliver(self, results: list[TextResult]) -> None:
        for result in results:
            try:
                self._deliver_one(result)
            except Exception as error:
                self._break_off(result.live, error)

    def _delivered(self, delivered: "asyncio.Future[None]", rows: Sequence[TextRow]) -> None:
        """A step's text is out, or is lost as a whole."""
        if delivered in self._steps:
            self._steps.remove(delivered)
            self._watch()
        error = None if delivered.cancelled() else delivered.exception()
        if isinstance(error, Exception):
            for row in rows:
                self._break_off(row.live, error)
        self._news()
