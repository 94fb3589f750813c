"""Reading a stream: events, timing, and servers that break the contract."""

import pytest

from cp_client.events import Logprobs, Reader, Route, Usage, join
from cp_wire import errors
from cp_wire.pb import common_pb2
from cp_wire.pb import coordinator_pb2 as pb
from tests.cp_client.fake_coordinator import WHOLE, accepted, finished, tokens


def read(responses, times=()):
    clock = iter([0.0, *times]).__next__ if times else (lambda: 0.0)
    reader = Reader(clock)
    events = [event for event in map(reader.read, responses) if event is not None]
    reader.end()
    return events, reader


def test_a_whole_stream():
    events, reader = read(WHOLE, [0.5, 0.7, 0.9])
    assert [(event.text, event.token_ids, event.finish_reason) for event in events] == [
        ("Hel", (5,), None),
        ("", (6,), None),
        ("lo", (7,), None),
        ("", (), "stop"),
    ]
    assert (reader.request_id, reader.seed) == ("r1", 7)
    answer = join(events, reader.seed)
    assert (answer.request_id, answer.text, answer.token_ids, answer.finish_reason) == ("r1", "Hello", (5, 6, 7), "stop")
    assert answer.usage == Usage(3, 3, 1, 0)
    assert answer.route == Route((0, 1), 2, (0, 1), (0, 1), "static")
    assert answer.timing.ttft_ms == pytest.approx(500)
    assert answer.timing.tpot_ms == pytest.approx(200)


def test_tokens_that_come_together_count_each():
    events, _ = read([accepted(), tokens("a", 1), tokens("bcd", 2, 3, 4), finished()], [1.0, 1.9])
    assert events[-1].timing.tpot_ms == pytest.approx(300)


@pytest.mark.parametrize(
    ("responses", "ttft"),
    [([accepted(), finished()], None), ([accepted(), tokens("late text"), tokens("a", 1), finished()], 250.0)],
)
def test_too_few_tokens_have_no_pace(responses, ttft):
    events, _ = read(responses, [0.25])
    assert events[-1].timing.ttft_ms == ttft
    assert events[-1].timing.tpot_ms is None


def test_logprobs():
    top = [common_pb2.TokenLogprob(token_id=4, logprob=-0.5), common_pb2.TokenLogprob(token_id=9, logprob=-2.0)]
    position = common_pb2.PositionLogprobs(sampled=-2.0, top=top)
    events, _ = read([accepted(), tokens("a", 9, logprobs=[position]), finished()])
    assert events[0].logprobs[0].sampled == -2.0
    assert events[0].logprobs[0].top == ((4, -0.5), (9, -2.0))


def test_completions_and_prompt_logprobs_are_put_together():
    first, second = common_pb2.PositionLogprobs(sampled=-1.0), common_pb2.PositionLogprobs(sampled=-3.0)
    ends = [pb.CompletionEnd(finish_reason="stop"), pb.CompletionEnd(finish_reason="length")]
    script = [
        accepted(),
        prompt(0, common_pb2.PositionLogprobs(), first),
        tokens("x", 9, index=1),
        prompt(2, second),
        tokens("a", 1),
        tokens("yz", 8, 7, index=1),
        tokens("b", 2),
        pb.GenerateResponse(finished=pb.Finished(finish_reason="stop", completions=ends)),
    ]
    events, reader = read(script, [2.0, 2.5])
    assert [event.index for event in events if event.token_ids] == [1, 0, 1, 0]
    answer = join(events, reader.seed)
    assert [(choice.text, choice.token_ids, choice.finish_reason) for choice in answer.choices] == [
        ("ab", (1, 2), "stop"),
        ("xyz", (9, 8, 7), "length"),
    ]
    assert (answer.text, answer.finish_reason) == ("ab", "stop")
    assert answer.prompt_logprobs == (None, Logprobs(-1.0, ()), Logprobs(-3.0, ()))
    assert (answer.timing.ttft_ms, answer.timing.tpot_ms) == (2000, 500), "those of completion 0"


def test_a_gap_in_prompt_logprobs_is_an_error():
    with pytest.raises(errors.Internal, match="at position 2, 1 have come"):
        read([accepted(), prompt(0, common_pb2.PositionLogprobs()), prompt(2, common_pb2.PositionLogprobs())])


def prompt(start, *positions):
    return pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(start=start, positions=positions))


@pytest.mark.parametrize(
    "responses", [[], [accepted()], [accepted(), tokens("a", 1)], [accepted(), finished(), tokens("b", 2)]]
)
def test_l3_a_stream_that_is_not_whole_is_an_error(responses):
    with pytest.raises(errors.Internal):
        read(responses)
