"""What the worker thread says while it runs a command."""

import asyncio
from concurrent.futures import Future

import pytest

from cp_wire.pb import rank_pb2
from rank_server.said import Said


def step(index: int) -> rank_pb2.StepResult:
    return rank_pb2.StepResult(index=index)


async def heard(said: Said) -> list[tuple[int, int]]:
    return [(result.index, worker_us) async for result, worker_us in said]


async def test_what_is_told_comes_in_order_and_the_end_has_the_rest_of_the_time():
    said, future = Said(asyncio.get_running_loop()), Future()
    said.last(future)
    said.more(step(0), 30)
    said.more(step(1), 20)
    future.set_result((step(2), 100))
    assert await heard(said) == [(0, 30), (1, 20)]
    assert said.result() == (step(2), 50)


async def test_time_counts_where_there_is_nothing_to_tell():
    said, future = Said(asyncio.get_running_loop()), Future()
    said.last(future)
    said.more(None, 30)
    said.more(step(1), 5)
    said.more(None, 20)
    future.set_result((step(2), 100))
    assert await heard(said) == [(1, 5)]
    assert said.result() == (step(2), 45)


async def test_it_is_heard_from_another_thread_while_the_command_runs():
    said, future = Said(asyncio.get_running_loop()), Future()
    said.last(future)
    await asyncio.to_thread(said.more, step(0), 30)
    assert (await asyncio.wait_for(anext(said), 5))[0].index == 0
    await asyncio.to_thread(future.set_exception, ValueError("broken"))
    assert await asyncio.wait_for(heard(said), 5) == []
    with pytest.raises(ValueError, match="broken"):
        said.result()


def test_nobody_is_told_where_nobody_listens_any_more():
    loop = asyncio.new_event_loop()
    said = Said(loop)
    loop.close()
    said.more(step(0), 1)
