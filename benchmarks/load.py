"""A load on a cluster: so many requests at once, of one prompt length, and what came of them."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, TypeVar

from benchmarks.harness import spread
from cp_client.events import Completion

T = TypeVar("T")


class Level(NamedTuple):
    """A load."""

    prompt: int
    """Tokens of each prompt."""
    concurrency: int
    """Requests at once."""


@dataclass(slots=True)
class Taken:
    """What came of one level."""

    answers: list[Completion] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens of the answers."""
        return sum(len(answer.token_ids) for answer in self.answers) / self.seconds

    def tokens_per_s(self, level: Level) -> float:
        """Those of the answered prompts included."""
        return self.output_tokens_per_s + level.prompt * len(self.answers) / self.seconds


def times(answers: Sequence[Completion]) -> dict[str, Any]:
    """Spreads over at least one answer, in ms as the client saw them."""
    return {
        "ttft_ms": spread([answer.timing.ttft_ms or 0.0 for answer in answers]),
        "tpot_ms": spread([answer.timing.tpot_ms or 0.0 for answer in answers]),
    }


def rounds(requests: int, concurrency: int) -> int:
    """How often a level is asked, so that at least `requests` are answered."""
    return -(-requests // concurrency)


def prompts(tokens: int, count: int, vocabulary: int, random: Random) -> Iterator[list[int]]:
    """So many of one length, of the ids from 1 to below `vocabulary`, no two alike as good as surely."""
    for _ in range(count):
        yield random.choices(range(1, vocabulary), k=tokens)


def at_once(
    ask: Callable[[Sequence[int], str], T], batch: Sequence[Sequence[int]], salt: str, most: int | None = None
) -> tuple[list[T], float]:
    """The answers to all prompts in their order, and the seconds until the last is whole; raises what a request ended with.

    most: requests that are under way together; the next one is sent when one has ended (None: all are sent together). Whoever
    is told to go meanwhile waits for none of them: they end with their client.
    """
    threads = ThreadPoolExecutor(most or len(batch))
    try:
        begun = time.perf_counter()
        answers = list(threads.map(lambda prompt: ask(prompt, salt), batch))
        return answers, time.perf_counter() - begun
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
