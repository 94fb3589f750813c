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


async def test_completions_are_merged_each_for_itself_and_keep_their_order():
    stream = RequestStream()
    stream.expect(2)
    for token in range(10):
        stream.put((token,), "a", index=0)
        stream.put((100 + token,), "b", index=1)
    first, second = await stream.next(), await stream.next()
    assert (first.index, first.token_ids, first.text) == (0, list(range(10)), "a" * 10)
    assert (second.index, second.token_ids) == (1, list(range(100, 110)))
    stream.put((10,), "c", index=0)
    third = await stream.next()
    assert (third.index, third.token_ids) == (0, [10])


async def test_the_last_completion_ends_the_request():
    stream = RequestStream()
    stream.expect(3)
    stream.complete(1, "length")
    stream.complete(0, "stop")
    assert not stream.ended
    stream.complete(2, "length")
    assert (stream.finish_reason, stream.reasons) == ("stop", {0: "stop", 1: "length", 2: "length"})


async def test_an_early_end_names_the_completions_that_were_not_whole():
    stream = RequestStream()
    stream.expect(2)
    stream.complete(0, "stop")
    stream.finish("abort")
    assert (stream.finish_reason, stream.reasons) == ("abort", {0: "stop", 1: "abort"})
    late = RequestStream()
    late.finish("abort")
    late.expect(2)
    assert (late.reasons, late.counts) == ({0: "abort"}, [0])


async def test_log_probabilities_of_a_prompt_come_in_pieces():
    stream = RequestStream()
    stream.put_prompt(1, [common_pb2.PositionLogprobs(sampled=-i) for i in range(MAX_CHUNK_TOKENS + 2)])
    pieces = [await stream.next() for _ in range(2)]
    assert [(piece.start, len(piece.positions)) for piece in pieces] == [(1, MAX_CHUNK_TOKENS), (1 + MAX_CHUNK_TOKENS, 2)]
    assert pieces[1].positions[0].sampled == -MAX_CHUNK_TOKENS
    stream.finish("abort")
    stream.put_prompt(5, [common_pb2.PositionLogprobs()])
    assert await stream.next() is None


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
