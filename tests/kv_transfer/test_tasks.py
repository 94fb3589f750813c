"""A shared budget and tasks that fail together."""

import asyncio

import pytest

from kv_transfer.budget import Budget
from kv_transfer.tasks import together

DEADLINE_S = 10.0


async def test_a_budget_is_never_exceeded_and_comes_back() -> None:
    budget, most = Budget(10), 0

    async def use(size: int) -> None:
        nonlocal most
        async with budget.hold(size):
            most = max(most, budget.held)
            await asyncio.sleep(0)

    async with asyncio.timeout(DEADLINE_S):
        await together(use(size) for size in (4, 6, 5, 1, 10, 3, 99, 7, 0))
    assert most == 10 and budget.held == 0


async def test_a_large_share_is_not_overtaken_for_ever() -> None:
    budget, order = Budget(10), list[str]()

    async def use(name: str, size: int) -> None:
        async with budget.hold(size):
            order.append(name)

    async with asyncio.timeout(DEADLINE_S), budget.hold(5):
        waiting = [asyncio.create_task(use("large", 10)), asyncio.create_task(use("small", 1))]
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == []
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*waiting)
    assert order == ["large", "small"]


async def test_whoever_stops_waiting_holds_nothing() -> None:
    budget = Budget(1)
    async with budget.hold(1):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001), budget.hold(1):
                raise AssertionError
    async with asyncio.timeout(DEADLINE_S), budget.hold(1):
        assert budget.held == 1


async def test_the_first_failure_ends_the_others_and_is_raised_as_it_is() -> None:
    ended = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def fail() -> None:
        await together([_raise(KeyError("inner"))])

    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(KeyError, match="inner"):
            await together([wait(), fail()])
    assert ended.is_set()


async def _raise(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error
