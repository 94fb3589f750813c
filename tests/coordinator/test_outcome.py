"""Answers of several ranks to one step."""

from types import SimpleNamespace

import pytest

from coordinator.faults import BadAnswer
from coordinator.outcome import put_together
from coordinator.plan import NOTHING_CHOSEN, DecodeMode, Gather, Row, ScheduledStep
from cp_wire.pb import common_pb2, rank_pb2

LANES = [SimpleNamespace(rank=rank) for rank in range(2)]


def step(*rows: Row) -> ScheduledStep:
    return ScheduledStep((), (), rows, DecodeMode.OWNER, Gather.Q, NOTHING_CHOSEN)


def row(handle: int, *, sample: bool = False, score_start: int = 0, scored: int = 0) -> Row:
    return Row(handle, 0, (7,) * 9, (), sample, 0, False, score_start, (7,) * scored)


def outcome(plan: ScheduledStep, *results: rank_pb2.StepResult):
    responses = [rank_pb2.ExecuteResponse(step=result, worker_us=1000 * (i + 1)) for i, result in enumerate(results)]
    for response in responses:
        response.step.ticket = 3
    return put_together(plan, 3, list(zip(LANES, responses, strict=True)))


def piece(handle: int, start: int, count: int) -> rank_pb2.PromptScores:
    positions = [common_pb2.PositionLogprobs(sampled=-float(start + i)) for i in range(count)]
    return rank_pb2.PromptScores(handle=handle, start=start, positions=positions)


def drawn(handle: int, token: int = 0, error: str = "") -> rank_pb2.SampledToken:
    return rank_pb2.SampledToken(handle=handle, token_id=token, error=error)


def test_a_step_takes_as_long_as_its_slowest_rank_and_exchanges_as_long_as_the_one_that_waited_least() -> None:
    got = outcome(step(row(1)), rank_pb2.StepResult(collective_us=700), rank_pb2.StepResult(collective_us=300))
    assert (got.rank_s, got.collective_s) == (0.002, 0.0003)


def test_tokens_come_from_whoever_holds_the_last_one() -> None:
    plan = step(row(1, sample=True), row(2, sample=True), row(3))
    got = outcome(plan, rank_pb2.StepResult(sampled=[drawn(2, 20)]), rank_pb2.StepResult(sampled=[drawn(1, 10)]))
    assert got.sampled == {1: 10, 2: 20}
    assert got.rank_s == 0.002


def test_scores_of_a_prompt_are_put_in_order() -> None:
    plan = step(row(1, score_start=1, scored=8))
    got = outcome(
        plan,
        rank_pb2.StepResult(scores=[piece(1, 1, 2), piece(1, 7, 2)]),
        rank_pb2.StepResult(scores=[piece(1, 3, 4)]),
    )
    assert [each.sampled for each in got.scores[1]] == [-float(position) for position in range(1, 9)]


@pytest.mark.parametrize(
    "pieces",
    [[], [(1, 3)], [(1, 2), (4, 2)], [(2, 4)], [(1, 5)]],
    ids=["none", "too few", "a gap", "shifted", "too many"],
)
def test_other_positions_than_asked_are_no_answer(pieces: list[tuple[int, int]]) -> None:
    scores = [piece(1, start, count) for start, count in pieces]
    with pytest.raises(BadAnswer, match="wanted 4 prompt scores and got others"):
        outcome(step(row(1, score_start=1, scored=4)), rank_pb2.StepResult(scores=scores), rank_pb2.StepResult())


def test_a_position_that_two_ranks_score_is_no_answer() -> None:
    with pytest.raises(BadAnswer, match="scored position 2 of a prompt twice"):
        outcome(
            step(row(1, score_start=1, scored=4)),
            rank_pb2.StepResult(scores=[piece(1, 1, 2)]),
            rank_pb2.StepResult(scores=[piece(1, 2, 3)]),
        )


def test_a_row_that_fails_on_one_rank_has_failed() -> None:
    plan = step(row(1, sample=True, score_start=1, scored=8), row(2, sample=True))
    got = outcome(
        plan,
        rank_pb2.StepResult(sampled=[drawn(1, 10), drawn(2, 20)], scores=[piece(1, 1, 4)]),
        rank_pb2.StepResult(sampled=[drawn(1, error="the logits are not finite")]),
    )
    assert (got.sampled, got.failed, got.scores) == ({2: 20}, {1: "the logits are not finite"}, {})


def test_scores_beside_a_failed_draw_of_the_same_row_are_dropped() -> None:
    plan = step(row(1, sample=True, score_start=1, scored=8), row(2, score_start=1, scored=2))
    failed = drawn(1, error="the logits are not finite")
    answer = rank_pb2.StepResult(sampled=[failed], scores=[piece(1, 1, 8), piece(2, 1, 2)])
    got = outcome(plan, answer, rank_pb2.StepResult())
    assert got.failed == {1: "the logits are not finite"}
    assert got.scores.keys() == {2}


def test_a_draw_that_nobody_asked_for_or_nobody_made_is_no_answer() -> None:
    for plan, result in (
        (step(row(1)), rank_pb2.StepResult(sampled=[drawn(1, 10)])),
        (step(row(1, sample=True)), rank_pb2.StepResult()),
    ):
        with pytest.raises(BadAnswer, match="draws and got"):
            outcome(plan, result, rank_pb2.StepResult())
