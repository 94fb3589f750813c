"""What the ranks answer to one plan, step by step."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from coordinator.faults import BadAnswer, CommandTimedOut
from coordinator.lane import Lane
from cp_wire.pb import rank_pb2

Answer = tuple[Lane, rank_pb2.ExecuteResponse]


class StepRun:
    """A plan on its way through the lanes (ranks ascending), sent at once; ends with the answers of all of them.

    stall_s: see `Lane.submit`.
    """

    def __init__(self, lanes: Sequence[Lane], plan: rank_pb2.StepPlan, stall_s: float) -> None:
        self._lanes = lanes
        self._plan = plan
        self._handles = {row.handle for row in plan.rows}
        self._news = asyncio.Event()
        self._told: list[list[Answer]] = [[] for _ in range(plan.ahead)]
        """By step, who has told of it before the run's end."""
        self._fault: BadAnswer | None = None
        self._asked = False
        self._answers = [lane.submit("step", plan, stall_s, partial(self._tell, lane)) for lane in lanes]
        self._to_come = len(lanes)
        """Answers that are not there yet."""
        for answer in self._answers:
            answer.add_done_callback(self._answered)

    def end(self, timeout_s: float) -> None:
        """Has the ranks end the run after the step that they are in, if one can be told in time; one hears it and all end."""
        if self._plan.ahead and not self._asked:
            self._asked = True
            self._lanes[0].end_run(self._plan.ticket, timeout_s)

    async def step(self, index: int, timeout_s: float) -> tuple[list[Answer], bool]:
        """The results of a step, 0, 1, … one after the other, and whether the run goes on. Those of the last one are of all
        ranks; of another one they are of the ranks that draw.

        Raises the first fault of a rank; `CommandTimedOut` names the first that is late.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (self._is_drawn(index) or self._is_over()):
                    self._news.clear()
                    await self._news.wait()
        # What comes in the turn of the event loop in which the time ends is not late.
        if self._is_drawn(index):
            return self._told[index], True
        if not self._is_over():
            late = next(lane.rank for lane, answer in zip(self._lanes, self._answers, strict=True) if not answer.done())
            raise CommandTimedOut(late, f"no result of a step within {timeout_s:.1f} s")
        last = list(zip(self._lanes, (answer.result() for answer in self._answers), strict=True))
        for lane, response in last:
            if response.step.index != index:
                raise BadAnswer(
                    lane.rank, f"its run of step {self._plan.ticket} ended with step {response.step.index}, not {index}"
                )
        return last, False

    def _tell(self, lane: Lane, response: rank_pb2.ExecuteResponse) -> None:
        index = response.step.index
        if index < len(self._told):
            self._told[index].append((lane, response))
        else:
            self._fault = BadAnswer(lane.rank, f"it goes on after step {index} of a run of {len(self._told) + 1}")
        self._news.set()

    def _answered(self, answer: "asyncio.Future[rank_pb2.ExecuteResponse]") -> None:
        """Only the last answer, or a fault, is news."""
        self._to_come -= 1
        if self._to_come == 0 or answer.cancelled() or answer.exception() is not None:
            self._news.set()

    def _is_drawn(self, index: int) -> bool:
        """Whether all that a step before the last has drawn is here."""
        if index >= len(self._told):
            return False
        return {token.handle for _, response in self._told[index] for token in response.step.sampled} >= self._handles

    def _is_over(self) -> bool:
        """Raises the fault of a rank that has one."""
        if self._fault is not None:
            raise self._fault
        for answer in self._answers:
            if answer.done():
                answer.result()
        return all(answer.done() for answer in self._answers)
