"""The bound on the prompt scores of one step."""

import pytest

from coordinator.limits import MAX_TOP_LOGPROBS
from coordinator.plan import Sampling
from coordinator.request import Request
from coordinator.rows import row_of
from coordinator.score_room import MAX_SCORED_VALUES_IN_STEP, ScoreRoom
from cp_wire.channels import MAX_MESSAGE_BYTES
from cp_wire.pb import common_pb2, rank_pb2


def request(prompt: int = 20, output: int = 0, top: int | None = 3, computed: int = 0, scored: int = 1) -> Request:
    one = Request(1, "r", [7] * prompt, Sampling(prompt_logprobs=top), output=[8] * output)
    one.num_computed, one.num_scored = computed, scored
    return one


@pytest.mark.parametrize(
    ("one", "values", "count", "taken"),
    [
        (request(top=None), 0, 20, 20),
        (request(), 76, 20, 20),
        (request(), 75, 20, 18),
        (request(), 75, 5, 5),
        (request(), 3, 20, 1),
        (request(computed=5), 8, 15, 2),
        (request(scored=11), 8, 20, 12),
        (request(scored=11), 0, 20, 10),
        (request(scored=20), 0, 20, 20),
        (request(output=5, scored=11), 36, 25, 25),
        (request(output=5, scored=11), 35, 25, 18),
    ],
)
def test_a_chunk_is_as_long_as_its_scores_have_room_for(one: Request, values: int, count: int, taken: int) -> None:
    assert ScoreRoom(values).take(one, count) == taken


def test_what_a_chunk_takes_is_what_its_row_scores() -> None:
    for one in (request(), request(computed=3, scored=9), request(output=4, scored=17), request(top=0)):
        count = one.num_known - one.num_computed
        values = len(row_of(one, count, ()).score_token_ids) * (1 + (one.sampling.prompt_logprobs or 0))
        room = ScoreRoom(values + 8)
        assert room.take(one, count) == count
        assert room.take(request(), 20) == 2, "8 values are left"


def test_a_room_that_is_used_up_lets_one_token_pass() -> None:
    room = ScoreRoom(4)
    assert [room.take(request(), 20) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("top", [0, 1, MAX_TOP_LOGPROBS])
def test_an_answer_within_the_bound_fits_into_a_message(top: int) -> None:
    alternatives = [common_pb2.TokenLogprob(token_id=2**32 - 1, logprob=-1.5)] * top
    each = rank_pb2.PromptScores(positions=[common_pb2.PositionLogprobs(sampled=-1.5, top=alternatives)]).ByteSize()
    assert 2 * each * MAX_SCORED_VALUES_IN_STEP // (1 + top) < MAX_MESSAGE_BYTES["prompt"]
