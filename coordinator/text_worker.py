"""The threads of the text edge: the event loop neither tokenises nor detokenises."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from coordinator.detokenizer import Detokenizer
from coordinator.text_rows import TextResult, TextRow, to_text
from cp_wire.errors import DeadlineExceeded

T = TypeVar("T")


class Text(Protocol):
    """What the coordinator asks of `coordinator.text.TextEdge`."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]: ...

    def detokenizer(self, stop: Sequence[str] = (), min_tokens: int = 0) -> Detokenizer: ...


class TextWorker:
    """One thread for output, so that results keep their order, one for prompts, and one for long prompts.

    A long prompt takes seconds: it delays no stream and no short prompt, whether it is accepted in the end or not.
    """

    def __init__(self, text: Text, encode_s: float) -> None:
        self.text = text
        self._encode_s = encode_s
        self._output = ThreadPoolExecutor(1, thread_name_prefix="detokenise")
        self._input = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._long_input = ThreadPoolExecutor(1, thread_name_prefix="tokenise-long")

    async def encode(self, work: Callable[[Text], T], *, long: bool) -> T:
        """Runs work(text edge) on a prompts' thread; raises DeadlineExceeded when it has not ended after `encode_s`."""
        thread = self._long_input if long else self._input
        done = asyncio.get_running_loop().run_in_executor(thread, work, self.text)
        try:
            return await asyncio.wait_for(done, self._encode_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the prompt was not tokenised within {self._encode_s:g} s") from None

    def submit(self, rows: Sequence[TextRow], deliver: Callable[[list[TextResult]], None]) -> "asyncio.Future[None]":
        """One hop for all rows of a step; `deliver` is called on the event loop, in the order of submission.

        The future ends after it, with whatever went wrong on either side.
        """
        loop = asyncio.get_running_loop()
        delivered: asyncio.Future[None] = loop.create_future()

        def arrive(produced: "Future[list[TextResult]]") -> None:
            if delivered.cancelled():
                return
            try:
                deliver(produced.result())
            except Exception as error:
                delivered.set_exception(error)
            else:
                delivered.set_result(None)

        def hand_back(produced: "Future[list[TextResult]]") -> None:
            if not loop.is_closed() and not produced.cancelled():
                loop.call_soon_threadsafe(arrive, produced)

        self._output.submit(to_text, rows).add_done_callback(hand_back)
        return delivered

    def close(self) -> None:
        """Lets the threads end; what they are doing is not waited for."""
        self._output.shutdown(wait=False, cancel_futures=True)
        self._input.shutdown(wait=False, cancel_futures=True)
        self._long_input.shutdown(wait=False, cancel_futures=True)
