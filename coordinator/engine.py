"""The loop of one scheduling set: schedule, send, collect, commit, hand the tokens to the text thread."""

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter

from coordinator.dispatch import Dispatcher
from coordinator.faults import BadAnswer, TextStuck
from coordinator.lane import Lane
from coordinator.outcome import Outcome, check_tables, put_together
from coordinator.plan import ScheduledStep
from coordinator.predict import StepPredictor
from coordinator.pricing import Pricing
from coordinator.relay import Relay
from coordinator.request import Request
from coordinator.scheduler import Progress, Scheduler
from coordinator.step_run import StepRun
from coordinator.step_times import StepMeter
from coordinator.text_backlog import TextBacklog
from coordinator.text_rows import LiveRequest, TextResult, TextRow
from coordinator.text_worker import TextWorker
from coordinator.timings import Timings
from coordinator.wire_plan import to_step_plan
from cp_wire.errors import Internal, KvloomError
from cp_wire.logs import get_logger

MAX_TEXT_BACKLOG = 64
"""Steps whose text may be outstanding before the engine waits for the text thread."""

SAFETY = 4
"""Times the predicted step that a step may take."""

log = get_logger("coordinator.engine")


class Engine:
    """Requests, scheduler and step loop of one set. Outlives the epochs of the set; `run` lives for one of them.

    members: pool member of each rank of the set, ranks ascending. before_step: called before each plan is made, so not
    between the steps that ranks take by themselves.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        members: Sequence[int],
        dispatcher: Dispatcher,
        text: TextWorker,
        predictor: StepPredictor,
        timings: Timings,
        pricing: Pricing,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler = scheduler
        self.pricing = pricing
        self.meter = StepMeter()
        self._members = members
        self._dispatcher = dispatcher
        self._predictor = predictor
        self._timings = timings
        self._before_step = before_step
        self._live: dict[int, LiveRequest] = {}
        self._relays: dict[int, Relay] = {}
        """Of requests whose prompt alone is computed here, until nothing of it is left here."""
        self._work = asyncio.Event()
        self._run: StepRun | None = None
        """What the ranks compute."""
        self._fault: Exception | None = None
        """What makes the books of scheduler or text doubtful: the run that finds it ends with it."""
        self._backlog = TextBacklog(text, timings.text_s, self._deliver, self._break_off, self._give_up_text, self._work.set)
        self._committed: list[TextRow] = []
        """Rows of the last step that the text thread has not got yet."""

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self._live) + len(self._relays)

    def submit(self, *lives: LiveRequest) -> None:
        """Queues the completions of a prompt, all or none; raises scheduler.QueueFull."""
        self.scheduler.add(*(live.request for live in lives))
        for live in lives:
            self._live[live.request.handle] = live
        self._queued()

    def expect(self, live: LiveRequest) -> None:
        """A request whose KV comes from another set; its relay reserves and activates it in the scheduler."""
        self._live[live.request.handle] = live

    def prefill(self, prompt: Request, relay: Relay) -> None:
        """Queues a prompt for a request whose output is computed elsewhere; raises scheduler.QueueFull."""
        self.scheduler.add(prompt)
        self._relays[prompt.handle] = relay
        self._queued()

    def stop(self, handle: int) -> None:
        """Computes nothing more of a prompt; its relay hears no more of it, unless the set is lost."""
        self.scheduler.abort(handle)
        self._changed()

    def part(self, handle: int) -> None:
        """Nothing of the prompt is left here."""
        self._relays.pop(handle, None)

    def wake(self) -> None:
        """There may be something to schedule."""
        self._changed()

    def abort(self, handle: int) -> None:
        """Ends a request in any state, without an event; its blocks are free when the ranks have ended the run that
        carries it. Idempotent."""
        live = self._live.pop(handle, None)
        if live is not None:
            self._abort(live)
            if live.relay is not None:
                live.relay.leave()

    def doubt(self, error: Exception) -> None:
        """The books may be wrong: the run that goes on, if any, ends with this error."""
        self._fault = error
        self._changed()

    def fail_all(self, error: KvloomError) -> None:
        """Ends all requests but those whose last text is on its way; pools and prefix cache are empty afterwards. Prompts that
        were computed for other sets are theirs to end."""
        self._hand_over()
        self.scheduler.fail_all(str(error))
        for handle, live in list(self._live.items()):
            if not live.committed_end:
                live.stream.fail(error)
                del self._live[handle]
                if live.relay is not None:
                    live.relay.leave()
        for relay in list(self._relays.values()):
            relay.lost(error)

    async def run(self, lanes: Sequence[Lane]) -> None:
        """Serves until cancelled; raises the `RankFault` of the first rank that fails a step, `TextStuck`, or a fault of the
        coordinator itself. lanes: ranks ascending.
        """
        ranks = [lane.rank for lane in lanes]
        # What broke the books before now has gone with the requests that were in them.
        self._fault = None
        while True:
            while len(self._backlog) > MAX_TEXT_BACKLOG:
                await self._idle()
            if self._fault is not None:
                raise self._fault
            started = perf_counter()
            self._before_step()
            step = self.scheduler.schedule()
            if step is None:
                self._hand_over()
                await self._idle()
                continue
            tables = self.scheduler.table_blocks
            async with self._dispatcher.turn(ranks) as ticket:
                await self._compute(step, ticket, lanes, tables, started)

    async def _compute(
        self, step: ScheduledStep, ticket: int, lanes: Sequence[Lane], tables: Sequence[int], started: float
    ) -> None:
        """Has the ranks compute a step, and those that they take by themselves after it."""
        limit_s = SAFETY * self._predictor.predict(step.facts)
        timeout_s = max(self._timings.step_floor_s, limit_s)
        plan = to_step_plan(step, ticket, timeout_ms=round(1000 * timeout_s))
        sent_bytes = plan.ByteSize()
        members = dict(zip((lane.rank for lane in lanes), self._members, strict=True))
        run = self._run = StepRun(lanes, plan, max(self._timings.stall_floor_s, limit_s))
        try:
            # The plans go out first; the previous step's text is prepared while the ranks compute.
            await asyncio.sleep(0)
            self._hand_over()
            for index in range(1 + step.ahead):
                answers, more = await run.step(index, timeout_s + self._timings.step_margin_s)
                check_tables(tables, members, answers)
                outcome = put_together(step, ticket, answers)
                self._deliver_scores(step, outcome)
                progress = self.scheduler.commit(step, outcome.sampled, outcome.failed, more=more)
                if more and any(each.finished for each in progress):
                    raise BadAnswer(answers[0][0].rank, f"step {ticket} went on after the end of a request")
                self._committed = self._rows(progress, outcome)
                self._relay(step, outcome)
                self._predictor.observe(step.facts, outcome.rank_s)
                self.pricing.observe(step, outcome.rank_s)
                ended = perf_counter()
                self.meter.record(step, ended - started, outcome.rank_s, outcome.collective_s, 0 if index else sent_bytes)
                following = self.scheduler.in_flight
                if following is None:
                    return
                step, started = following, ended
                self._hand_over()
                if len(self._backlog) > MAX_TEXT_BACKLOG:
                    run.end(self._timings.beside_s)
        except BaseException:
            # Ranks that are still well would make their next command wait for all that the plan allows.
            run.end(self._timings.beside_s)
            raise
        finally:
            self._run = None

    def _queued(self) -> None:
        """One more request waits. A run under way goes on unless it may have a seat before somebody leaves."""
        self._work.set()
        if self._run is not None and self.scheduler.may_grow:
            self._run.end(self._timings.beside_s)

    def _changed(self) -> None:
        """There is something to schedule, or nothing more to compute for somebody: a run under way has to end."""
        self._work.set()
        if self._run is not None:
            self._run.end(self._timings.beside_s)

    async def _idle(self) -> None:
        """Until there is work, news of the text that is still on its way, or a fault."""
        self._work.clear()
        await self._work.wait()

    def _give_up_text(self) -> None:
        """Ends all requests, those too whose last text is on its way: it will not come, or too late."""
        error = TextStuck(f"the text thread has finished nothing for {self._timings.text_s:g} s")
        stuck = [*self._live.values(), *(relay.live for relay in self._relays.values())]
        self._live.clear()
        for live in stuck:
            live.stream.fail(error)
            if live.relay is not None:
                live.relay.ended()
        self._committed = []
        self.doubt(error)

    def _deliver_scores(self, step: ScheduledStep, outcome: Outcome) -> None:
        """Before the step's tokens: these take the way through the text thread."""
        for row in step.rows:
            positions, relay = outcome.scores.get(row.handle), self._relays.get(row.handle)
            live = self._live.get(row.handle) if relay is None else relay.live
            if positions and live is not None and (relay is None or relay.scores_prompt):
                live.stream.put_prompt(row.score_start, positions)

    def _relay(self, step: ScheduledStep, outcome: Outcome) -> None:
        """Tells of prompts that have come further, and lets first tokens go before other sets can compute second ones."""
        for row in step.rows:
            relay = self._relays.get(row.handle)
            if relay is not None and not row.sample and row.handle not in outcome.failed:
                relay.computed(row.start + len(row.token_ids))
        if self._relays:
            self._hand_over()

    def _rows(self, progress: Sequence[Progress], outcome: Outcome) -> list[TextRow]:
        rows = []
        for each in progress:
            relay = self._relays.get(each.handle)
            item = each if relay is None else relay.prefilled(each)
            live = self._live.get(each.handle) if relay is None else relay.live
            if live is None or item is None:
                continue
            live.committed_end = item.finished is not None
            logprobs = outcome.logprobs.get(item.handle)
            rows.append(TextRow(live, item.new_token, logprobs, item.finished, item.error))
        return rows

    def _hand_over(self) -> None:
        if self._committed:
            rows, self._committed = self._committed, []
            self._backlog.submit(rows)

    def _deliver(self, result: TextResult) -> None:
        live, handle = result.live, result.live.request.handle
        live.stream.put(result.token_ids, result.text, result.logprobs, live.index)
        if result.finished is None:
            return
        if not live.committed_end:
            # Only the text knew that this was the end; a token computed meanwhile is dropped.
            self.scheduler.finish(handle, result.finished)
            self._changed()
        self._live.pop(handle, None)
        if live.relay is not None:
            live.relay.ended()
        if result.finished == "error":
            live.stream.fail(Internal(result.error or "the request failed"))
        else:
            live.stream.complete(live.index, result.finished)

    def _break_off(self, live: LiveRequest, error: Exception) -> None:
        """Ends a request whose output can't be delivered."""
        log.error("delivery failed", exc=error, request=live.request.request_id)
        live.stream.fail(Internal(f"the output could not be delivered ({type(error).__name__})"))
        self._live.pop(live.request.handle, None)
        self._abort(live)
        if live.relay is not None:
            live.relay.ended()

    def _abort(self, live: LiveRequest) -> None:
        try:
            self.scheduler.abort(live.request.handle)
        except Exception as fault:
            log.error("a request can't be ended", exc=fault, request=live.request.request_id)
            self.doubt(fault)
        self._changed()
