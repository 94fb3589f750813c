"""One request's way back: order, merging, exactly one end."""

import asyncio

import pytest

from coordinator.stream import MAX_CHUNK_TOKENS, RequestStream
from cp_wire.errors import Internal, Unavailable
from cp_wire.pb import common_pb2


async def test_unread_output_is_merged_up_to_a_bound():
    stream = RequestStream()
    for token in range(2 * MAX_CHUNK_TOKENS + 1):
        stream.put((token,), "x", common_pb2.PositionLogprobs(sampled=-1))
    stream.finish("length")
    chunks = [await stream.next() for _ in range(3)]
    assert [len(chunk.token_ids) for chunk in chunks] == [MAX_CHUNK_TOKENS, MAX_CHUNK_TOKENS, 1]
    assert all(len(chunk.text) == len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(2 * MAX_CHUNK_TOKENS + 1))
    assert await stream.next() is None


async def test_first_end_wins_and_nothing_follows_it():
    stream = RequestStream()
    stream.put((1,), "a")
    stream.finish("stop")
    stream.fail(Internal("too late"))
    stream.put((2,), "b")
    assert (await stream.next()).token_ids == [1]
    assert await stream.next() is None
    assert (stream.finish_reason, stream.counts) == ("stop", [1])


async def test_what_was_put_before_a_failure_is_delivered():
    stream = RequestStream()
    stream.put((1,), "a")
    stream.fail(Unavailable("gone"))
    stream.finish("stop")
    assert (await stream.next()).text == "a"
    with pytest.raises(Unavailable, match="gone"):
        await stream.next()
    assert stream.finish_reason is None


async def test_reader_wakes_up_for_output_and_for_the_end():
    stream = RequestStream()
    reader = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.put((5,), "")
    assert (await reader).token_ids == [5]
    reader = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.finish("length")
    assert await reader is None
