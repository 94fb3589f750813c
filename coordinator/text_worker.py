"""The threads of the text edge: the event loop neither tokenises nor detokenises."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from coordinator.detokenizer import Detokenizer
from coordinator.text_rows import TextResult, TextRow, to_text

T = TypeVar("T")


class Text(Protocol):
    """What the coordinator asks of `coordinator.text.TextEdge`."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]: ...

    def detokenizer(self, stop: Sequence[str] = ()) -> Detokenizer: ...


class TextWorker:
    """One thread for output, so that results keep their order, and one for prompts, so that a long one delays no stream."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self._output = ThreadPoolExecutor(1, thread_name_prefix="detokenise")
        self._input = ThreadPoolExecutor(1, thread_name_prefix="tokenise")

    async def encode(self, work: Callable[[Text], T]) -> T:
        """Runs work(text edge) on the prompts' thread."""
        return await asyncio.get_running_loop().run_in_executor(self._input, work, self.text)

    def submit(self, rows: Sequence[TextRow], deliver: Callable[[list[TextResult]], None]) -> "asyncio.Future[None]":
        """One hop for all rows of a step; `deliver` is called on the event loop, in the order of submission."""
        loop = asyncio.get_running_loop()
        delivered: asyncio.Future[None] = loop.create_future()

        def arrive(results: list[TextResult]) -> None:
            try:
                deliver(results)
            finally:
                # Whoever waits for room in the backlog must not hang on a fault in the delivery.
                if not delivered.done():
                    delivered.set_result(None)

        def work() -> None:
            results = to_text(rows)
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrive, results)

        self._output.submit(work)
        return delivered

    def close(self) -> None:
        """Lets the threads end; what they are doing is not waited for."""
        self._output.shutdown(wait=False, cancel_futures=True)
        self._input.shutdown(wait=False, cancel_futures=True)
