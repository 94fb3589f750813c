"""Background work that does not end in silence."""

import asyncio

import pytest

from coordinator.tasks import Background, Changes, all_or_first_error


async def test_h18_exception_in_a_background_task_is_reported_with_its_name():
    reports = []
    background = Background(lambda name, error: reports.append((name, str(error))))

    async def fail() -> None:
        raise RuntimeError("poison")

    task = background.spawn(fail(), "worker")
    await asyncio.wait({task})
    await asyncio.sleep(0)
    assert reports == [("worker", "poison")]


async def test_cancelled_and_finished_tasks_are_no_failures():
    reports = []
    background = Background(lambda name, error: reports.append(name))
    background.spawn(asyncio.sleep(0), "short")
    endless = background.spawn(asyncio.Event().wait(), "endless")
    await background.cancel()
    assert endless.cancelled() and not reports


async def test_first_error_cancels_the_rest():
    ended = []

    async def fail() -> None:
        raise ValueError("first")

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waiter")

    with pytest.raises(ValueError, match="first"):
        await all_or_first_error([wait(), fail()])
    assert ended == ["waiter"]

    async def give(value: int) -> int:
        return value

    assert await all_or_first_error([give(1), give(2)]) == [1, 2]


async def test_changes_wake_waiters_and_are_not_lost():
    changes = Changes()
    waiter = asyncio.create_task(changes.beyond(0))
    await asyncio.sleep(0)
    changes.announce()
    changes.announce()
    assert await waiter == 2
    assert await changes.beyond(1) == 2
