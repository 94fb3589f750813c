"""The ordered command stream, against a servicer that answers what the test wants."""

import asyncio
import contextlib
import gc

import pytest

from coordinator.faults import CommandFailed, CommandTimedOut, LaneClosed
from coordinator.lane import Lane
from cp_wire.channels import open_channel
from cp_wire.pb import rank_pb2, rank_pb2_grpc
from cp_wire.serve import Server


class Script(rank_pb2_grpc.RankServiceServicer):
    """Hands every request to the test, sends what the test puts into `answers`; None ends the lane."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[rank_pb2.ExecuteRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[rank_pb2.ExecuteResponse | None] = asyncio.Queue()
        self.ends: asyncio.Queue[rank_pb2.EndRunRequest] = asyncio.Queue()

    async def Execute(self, request_iterator, context):
        async def read() -> None:
            async for request in request_iterator:
                self.requests.put_nowait(request)

        reader = asyncio.create_task(read())
        while (answer := await self.answers.get()) is not None:
            yield answer
        reader.cancel()

    async def EndRun(self, request, context):
        self.ends.put_nowait(request)
        return rank_pb2.EndRunResponse()

    def answer(self, sequence: int, **result: object) -> None:
        fields = {"sequence": sequence, "instance": "life", "epoch": 3, "reset_done": rank_pb2.ResetDone()} | result
        self.answers.put_nowait(rank_pb2.ExecuteResponse(**fields))


@contextlib.asynccontextmanager
async def lane_to(script: Script):
    server = Server("127.0.0.1", 0, "prompt")
    server.add(rank_pb2_grpc.add_RankServiceServicer_to_server, script, "kvloom.v1.RankService")
    closed: list[str] = []
    async with open_channel(await server.start(), "prompt") as channel:
        lane = Lane(7, "life", rank_pb2_grpc.RankServiceStub(channel), closed.append)
        lane.epoch = 3
        async with asyncio.timeout(5):
            yield lane, closed
            lane.close("the test ends")
            assert len(closed) == 1
    await server.stop(0)


def reset(lane: Lane):
    return lane.submit("reset", rank_pb2.Reset(), 1.0)


async def test_queued_commands_travel_in_order_and_answers_are_matched_by_sequence():
    script = Script()
    async with lane_to(script) as (lane, _):
        answers = [reset(lane) for _ in range(3)]
        sent = [await script.requests.get() for _ in range(3)]
        assert [(one.sequence, one.epoch, one.instance) for one in sent] == [(1, 3, "life"), (2, 3, "life"), (3, 3, "life")]
        for sequence in (2, 1, 3):
            script.answer(sequence, worker_us=sequence)
        assert [(await answer).worker_us for answer in answers] == [1, 2, 3]


async def test_error_answer_is_an_exception_of_its_command_alone():
    script = Script()
    async with lane_to(script) as (lane, _):
        first, second = reset(lane), reset(lane)
        error = rank_pb2.CommandError(reason="PLAN_REFUSED", message="a gap")
        script.answers.put_nowait(rank_pb2.ExecuteResponse(sequence=1, instance="life", epoch=3, error=error))
        script.answer(2)
        with pytest.raises(CommandFailed, match=r"^rank 7: PLAN_REFUSED in reset$") as caught:
            await first
        assert (caught.value.reason, caught.value.detail) == ("PLAN_REFUSED", "PLAN_REFUSED: a gap")
        assert (await second).sequence == 2


async def test_deadline_is_kept_and_a_late_answer_is_ignored():
    script = Script()
    async with lane_to(script) as (lane, closed):
        with pytest.raises(CommandTimedOut, match=r"rank 7: no answer to reset within 0\.05 s"):
            await lane.send("reset", rank_pb2.Reset(), 0.05)
        later = reset(lane)
        script.answer(1)
        script.answer(2)
        assert (await later).sequence == 2
        assert not closed


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"instance": "another life"}, "another instance"),
        ({"epoch": 2}, "another instance or epoch 2"),
        ({"sequence": 9}, "which is not open"),
        ({"group_opened": rank_pb2.GroupOpened()}, "answered reset with group_opened"),
    ],
)
async def test_answer_that_contradicts_its_command_closes_the_lane(wrong, reason):
    script = Script()
    async with lane_to(script) as (lane, closed):
        answer = reset(lane)
        script.answer(**({"sequence": 1} | wrong))
        with pytest.raises((LaneClosed, asyncio.CancelledError)):
            await answer
        assert len(closed) == 1 and reason in closed[0]


async def test_end_of_the_stream_fails_everything_and_calls_back_once():
    script = Script()
    async with lane_to(script) as (lane, closed):
        answers = [reset(lane), reset(lane)]
        # A stream that ends under a command still on its way breaks instead, as it may in earnest.
        for _ in answers:
            await script.requests.get()
        script.answers.put_nowait(None)
        for answer in answers:
            with pytest.raises(LaneClosed, match="rank 7: its lane ended"):
                await answer
        assert closed == ["its lane ended"]
        with pytest.raises(LaneClosed):
            await reset(lane)
        lane.close("again")
        assert closed == ["its lane ended"]


async def test_unreachable_rank_closes_the_lane():
    closed: list[str] = []
    async with open_channel("127.0.0.1:1", "prompt") as channel:
        lane = Lane(7, "life", rank_pb2_grpc.RankServiceStub(channel), closed.append)
        with pytest.raises(LaneClosed, match=r"its lane broke \(UNAVAILABLE\)"):
            await asyncio.wait_for(reset(lane), 5)
        assert len(closed) == 1


async def test_stall_limits_belong_to_open_commands():
    script = Script()
    async with lane_to(script) as (lane, _):
        first, unlimited = reset(lane), lane.submit("configure", rank_pb2.Configure(), None)
        assert (lane.stall_limit_s(1), lane.stall_limit_s(2), lane.stall_limit_s(3)) == (1.0, None, None)
        lane.tolerate_stalls(9.0)
        assert (lane.stall_limit_s(1), lane.stall_limit_s(2)) == (9.0, None)
        script.answer(1)
        await first
        assert lane.stall_limit_s(1) is None
        unlimited.cancel()


async def test_answers_that_nobody_waits_for_any_more_are_no_unnoticed_failures():
    unnoticed: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unnoticed.append(context["message"]))
    script = Script()
    async with lane_to(script) as (lane, _):
        reset(lane)
        await script.requests.get()
        lane.close("it is lost")
        reset(lane)
        await asyncio.sleep(0)
    gc.collect()
    assert not unnoticed


async def test_what_a_rank_says_of_a_run_comes_before_its_answer_and_in_order():
    script = Script()
    async with lane_to(script) as (lane, closed):
        told: list[int] = []
        answer = lane.submit("step", rank_pb2.StepPlan(), 1.0, lambda response: told.append(response.step.index))
        for index, more in ((0, True), (1, True), (2, False)):
            step = rank_pb2.StepResult(index=index)
            script.answers.put_nowait(rank_pb2.ExecuteResponse(sequence=1, instance="life", epoch=3, step=step, more=more))
        assert (await answer).step.index == 2 and told == [0, 1]
        assert not closed


async def test_a_rank_that_says_more_than_it_was_asked_for_is_not_heard_any_more():
    script = Script()
    async with lane_to(script) as (lane, closed):
        answer = reset(lane)
        script.answer(1, more=True)
        with pytest.raises(asyncio.CancelledError):
            await answer
        assert closed == ["it has not ended reset with what it says"]


async def test_the_end_of_a_run_is_asked_for_once_and_by_no_closed_lane():
    script = Script()
    async with lane_to(script) as (lane, _):
        lane.end_run(5, 1.0)
        asked = await script.ends.get()
        assert (asked.instance, asked.epoch, asked.ticket) == ("life", 3, 5)
        lane.close("over")
        lane.end_run(6, 1.0)
        assert script.ends.empty()
