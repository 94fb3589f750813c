"""Runs N ranks as N threads of the test's process."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def run_ranks(num_ranks: int, rank_main: Callable[[int], Result], deadline_s: float = 30.0) -> list[Result]:
    """Calls rank_main(rank) in a thread per rank and returns the results in rank order.

    Re-raises the error that happened first; AssertionError naming the ranks that are not done by the deadline.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = rank_main(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if errors:
        raise errors[0]
    if stuck:
        raise AssertionError(f"not done after {deadline_s} s: {', '.join(stuck)}")
    return [results[rank] for rank in range(num_ranks)]
