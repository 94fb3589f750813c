"""What the ranks answer to one plan, as the engine gets it."""

import asyncio

import pytest

from coordinator.faults import BadAnswer, CommandFailed, CommandTimedOut
from coordinator.step_run import StepRun
from cp_wire.pb import rank_pb2


class FakeLane:
    """Keeps what it is given; the test answers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ended: list[int] = []

    def submit(self, kind, plan, stall_s, on_more=None):
        self.answer, self.tell = asyncio.get_running_loop().create_future(), on_more
        self.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        return self.answer

    def end_run(self, ticket: int, timeout_s: float) -> None:
        self.ended.append(ticket)

    def say(self, index: int, *handles: int, more: bool = True) -> None:
        result = rank_pb2.StepResult(index=index, sampled=[rank_pb2.SampledToken(handle=handle) for handle in handles])
        response = rank_pb2.ExecuteResponse(step=result, more=more)
        if more:
            self.tell(response)
        else:
            self.answer.set_result(response)


def begin(ahead: int, handles=(1, 2)):
    lanes = [FakeLane(rank) for rank in range(2)]
    plan = rank_pb2.StepPlan(ticket=7, ahead=ahead, rows=[rank_pb2.StepRow(handle=handle) for handle in handles])
    return lanes, StepRun(lanes, plan, 1.0)


async def result(run: StepRun, index: int):
    """A step that comes long before its time is over."""
    async with asyncio.timeout(5):
        return await run.step(index, 60)


def ranks(answers) -> list[int]:
    return [lane.rank for lane, _ in answers]


async def test_a_step_of_a_run_is_there_when_all_its_rows_have_been_drawn_by_whomever():
    (first, second), run = begin(2)
    first.say(0, 1)
    waiting = asyncio.create_task(result(run, 0))
    await asyncio.sleep(0)
    assert not waiting.done()
    second.say(0, 2)
    answers, more = await waiting
    assert ranks(answers) == [0, 1] and more


async def test_the_last_step_is_what_all_ranks_answer_at_whatever_step_they_end():
    (first, second), run = begin(5)
    first.say(0, 1, 2)
    first.say(1, 1, 2)
    first.say(2, 1, 2, more=False)
    second.say(2, more=False)
    assert [(ranks(answers), more) for answers, more in [await result(run, index) for index in range(3)]] == [
        ([0], True),
        ([0], True),
        ([0, 1], False),
    ]


async def test_without_a_run_the_answers_are_the_step():
    (first, second), run = begin(0)
    waiting = asyncio.create_task(result(run, 0))
    for lane in (first, second):
        await asyncio.sleep(0)
        assert not waiting.done()
        lane.say(0, 1, 2, more=False)
    answers, more = await waiting
    assert ranks(answers) == [0, 1] and not more
    run.end(1.0)
    assert not first.ended + second.ended


async def test_ranks_that_end_a_run_at_different_steps_do_not_agree_on_what_happened():
    (first, second), run = begin(5)
    first.say(0, 1, 2, more=False)
    second.say(1, more=False)
    with pytest.raises(BadAnswer, match="rank 1: its run of step 7 ended with step 1, not 0"):
        await result(run, 0)


async def test_a_run_is_no_longer_than_its_plan_allows():
    (first, _), run = begin(1)
    first.say(1, 1, 2)
    with pytest.raises(BadAnswer, match="rank 0: it goes on after step 1 of a run of 2"):
        await result(run, 0)


async def test_a_plan_that_allows_no_run_has_no_step_that_another_one_follows():
    (first, _), run = begin(0)
    waiting = asyncio.create_task(result(run, 0))
    await asyncio.sleep(0)
    first.say(0, 1, 2)
    with pytest.raises(BadAnswer, match="rank 0: it goes on after step 0 of a run of 1"):
        await waiting


async def test_a_rank_that_fails_in_a_run_ends_it_whoever_has_still_to_answer():
    (first, second), run = begin(3)
    first.say(0, 1, 2)
    await result(run, 0)
    waiting = asyncio.create_task(result(run, 1))
    await asyncio.sleep(0)
    second.answer.set_exception(CommandFailed(1, "step", "OUT_OF_MEMORY", "no"))
    with pytest.raises(CommandFailed, match="rank 1: OUT_OF_MEMORY"):
        await waiting


@pytest.mark.parametrize("ahead", [0, 3])
async def test_of_the_ranks_that_are_late_the_first_is_named(ahead):
    (first, _), run = begin(ahead)
    first.say(0, 1, 2, more=False)
    with pytest.raises(CommandTimedOut, match="rank 1: no result of a step within"):
        await run.step(0, 0.0)


@pytest.mark.parametrize("how", ["told", "answered", "failed"])
async def test_what_comes_in_the_turn_in_which_its_time_ends_counts(how):
    (first, second), run = begin(3)
    waiting = asyncio.create_task(run.step(0, 0.0))
    while not waiting.cancelling():  # noqa: ASYNC110 - then its time is over, and it has not heard of it yet
        await asyncio.sleep(0)
    if how == "told":
        first.say(0, 1, 2)
        answers, more = await waiting
        assert ranks(answers) == [0] and more
    elif how == "answered":
        first.say(0, 1, 2, more=False)
        second.say(0, more=False)
        answers, more = await waiting
        assert ranks(answers) == [0, 1] and not more
    else:
        second.answer.set_exception(CommandFailed(1, "step", "OUT_OF_MEMORY", "no"))
        with pytest.raises(CommandFailed, match="rank 1: OUT_OF_MEMORY"):
            await waiting


async def test_one_rank_is_asked_to_end_a_run_once():
    (first, second), run = begin(3)
    run.end(1.0)
    run.end(1.0)
    assert (first.ended, second.ended) == ([7], [])
