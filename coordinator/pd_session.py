"""Leads one request from the set that computes its prompt to that which computes its output, as `coordinator.passage` says."""

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from coordinator import pd
from coordinator.engine import Engine
from coordinator.kv_mover import End, KvMover
from coordinator.passage import Impossible, Passage, Phase, advance
from coordinator.pd_work import PdWork
from coordinator.rank_set import RankSet
from coordinator.request import Request
from coordinator.scheduler_types import Progress, QueueFull
from coordinator.text_rows import LiveRequest
from cp_wire.errors import Internal, KvloomError, Unavailable
from cp_wire.logs import get_logger

if TYPE_CHECKING:
    from coordinator.handover import Handover

NO_PREFILL_RANKS = "NO_PREFILL_RANKS"
PREFILL_LOST = "PREFILL_LOST"
PREFILL_FULL = "PREFILL_FULL"
PREFILL_TOO_SMALL = "PREFILL_TOO_SMALL"

log = get_logger("coordinator.pd")


class PdSession:
    """One request. A `Relay` for both engines; carries out the actions of its `Passage`.

    Its handle is the same on both sides, and names the session of its transfer.
    """

    def __init__(self, live: LiveRequest, home: RankSet, hub: "Handover") -> None:
        request = live.request
        self._live = live
        self._home = home
        self._hub = hub
        self._prompt = Request(
            handle=request.handle,
            request_id=request.request_id,
            prompt=request.prompt,
            digests=live.prompt_digests,
            sampling=replace(request.sampling, max_tokens=1),
            salt=request.salt,
            is_leased=True,
        )
        self.state = Passage(len(request.prompt), request.sampling.max_tokens > 1, hub.recompute)
        self._cause: str | None = None
        """Why the output's set had to compute tokens of the prompt."""
        self._source: RankSet | None = None
        self._target_end: End | None = None
        self._work: PdWork | None = None
        """From the moment when the prompt's set is known."""
        self._events: deque[pd.Event] = deque()
        self._busy = False
        self._public = ""
        """What a client may hear of a failure, where there is more to say than its cause."""

    @property
    def live(self) -> LiveRequest:
        """See `Relay`."""
        return self._live

    @property
    def scores_prompt(self) -> bool:
        """See `Relay`."""
        return self.state.phase is Phase.PREFILL or self.state.decision is not None

    @property
    def prefill_ranks(self) -> tuple[int, ...]:
        """See `Relay`."""
        return self._home.spec.ranks if self._source is None else self._source.spec.ranks

    @property
    def route_reason(self) -> str:
        """See `Relay`."""
        return "prefill and decode apart" if self._cause is None else f"recomputed after {self._cause}"

    def reserved(self, num_cached: int) -> None:
        """The output's set has a place for the request, and the KV of its first `num_cached` tokens.

        That is its prefix hit, unless its whole prompt is computed by the prompt's set, with the hit that it has there.
        """
        self._live.request.num_cached_tokens = num_cached
        self._target_end = self._hub.end(self._home, self._live.request)
        self._handle(pd.Reserved(num_cached))

    def broken(self, error: Exception) -> None:
        """Ends the request after a fault of the coordinator itself.

        What it holds is given back as if its client had left. Where even that fails, the sets that have something of it start
        over, with new books.
        """
        request = self._live.request
        log.error("a request could not be handed over", exc=error, request=request.request_id, session=request.handle)
        self._live.stream.fail(Internal(f"the request could not be handed over ({type(error).__name__})"))
        try:
            self._give_back(request.handle)
        except Exception as fault:
            self._start_over(fault)

    def _start_over(self, fault: Exception) -> None:
        """After a fault of what gives back or ends: nobody can say who still reads or writes, until the sets have new books."""
        request = self._live.request
        log.error("a request can't be ended", exc=fault, request=request.request_id, session=request.handle)
        self._live.stream.fail(Internal(f"the request could not be handed over ({type(fault).__name__})"))
        for side in (self._home, self._source):
            if side is not None:
                side.serving.doubt(fault)
        self.state = replace(self.state, phase=Phase.OVER, prefill_holds=False)
        self._engine.abort(request.handle)
        self._close()

    def _give_back(self, handle: int) -> None:
        if self._source is None:
            self.state = replace(self.state, prefill_holds=False)
        elif self.state.phase is Phase.OVER:
            self._prompts.scheduler.end_lease(handle)
        if self.state.moving is None:
            self._engine.scheduler.cancel(handle)
        self.ended()

    def computed(self, tokens: int) -> None:
        """See `Relay`."""
        self._handle(pd.Computed(tokens))

    def prefilled(self, progress: Progress) -> Progress | None:
        """See `Relay`."""
        if self.state.phase is not Phase.PREFILL:
            return None
        request, prompt = self._live.request, self._prompt
        request.num_cached_tokens, request.num_scored = prompt.num_cached_tokens, prompt.num_scored
        if progress.new_token is not None:
            request.output.append(progress.new_token)
        if progress.finished == "length" and request.sampling.max_tokens > 1:
            self._handle(pd.Prefilled())
            return Progress(progress.handle, progress.new_token, None)
        self._handle(pd.Left())
        return progress

    def lost(self, error: KvloomError) -> None:
        """See `Relay`."""
        self._public = error.message
        self._handle(pd.PrefillLost(PREFILL_LOST))

    def leave(self) -> None:
        """See `Relay`."""
        self._handle(pd.Left())

    def ended(self) -> None:
        """See `Relay`."""
        self._engine.abort(self._live.request.handle)
        self.leave()

    @property
    def _engine(self) -> Engine:
        return self._home.serving

    def _handle(self, event: pd.Event) -> None:
        """One event after the other, also those that come of what another one leads to."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                self._take(self._events.popleft())
        finally:
            self._busy = False
        if self.state.phase is Phase.OVER:
            self._close()

    def _take(self, event: pd.Event) -> None:
        """A fault in one action keeps no other from being carried out."""
        try:
            self.state, actions = advance(self.state, event)
        except Impossible as error:
            self.broken(error)
            return
        for action in actions:
            try:
                self._do(action)
            except Exception as error:
                ends = isinstance(action, pd.StopMove | pd.EndLease)
                (self._start_over if ends else self.broken)(error)

    def _do(self, action: pd.Action) -> None:
        handle = self._live.request.handle
        match action:
            case pd.Prefill():
                self._prefill()
            case pd.Move(start, end, attempt):
                self._working.move(start, end, attempt)
            case pd.StopMove():
                self._working.stop_move()
            case pd.Activate(num_tokens, cause):
                self._activate(num_tokens, cause)
            case pd.Cancel():
                self._engine.scheduler.cancel(handle)
                self._engine.wake()
            case pd.Fail(cause):
                self._fail(cause)
            case pd.AbortPrefill():
                self._prompts.stop(handle)
            case pd.EndLease():
                self._working.end_lease(lambda: self.state.prefill_holds)
            case pd.ForgetMoves():
                self._working.forget_moves()
            case pd.FreePrefill():
                self._prompts.scheduler.end_lease(handle)
                self._prompts.wake()

    @property
    def _working(self) -> PdWork:
        assert self._work is not None
        return self._work

    @property
    def _prompts(self) -> Engine:
        assert self._source is not None
        return self._source.serving

    def _prefill(self) -> None:
        self._source = self._hub.pick_source()
        if self._source is None:
            self._handle(pd.PrefillLost(NO_PREFILL_RANKS))
            return
        source_end = self._hub.end(self._source, self._prompt)
        assert self._target_end is not None
        mover = KvMover(self._prompt.handle, source_end, self._target_end, self._hub.timings)
        self._work = PdWork(
            self._prompt, mover, self._source, self._home, self._hub, self._handle, self.broken, self._start_over
        )
        try:
            self._prompts.prefill(self._prompt, self)
        except QueueFull:
            self._handle(pd.PrefillLost(PREFILL_FULL))
        except ValueError as error:
            log.warning("a prompt has no room on the side for prompts", request=self._prompt.request_id, why=str(error))
            self._handle(pd.PrefillLost(PREFILL_TOO_SMALL))

    def _activate(self, num_tokens: int, cause: str | None) -> None:
        request, engine = self._live.request, self._engine
        request.num_scored = max(request.num_scored, self._prompt.num_scored)
        self._cause = cause
        if cause is None:
            self._hub.stats.requests += 1
        else:
            self._hub.stats.recomputed[cause] += 1
            log.warning("KV is recomputed", request=request.request_id, cause=cause, tokens=len(request.prompt) - num_tokens)
        engine.scheduler.arrive(request.handle, num_tokens)
        engine.wake()

    def _fail(self, cause: str) -> None:
        request = self._live.request
        self._hub.stats.failed[cause] += 1
        said = f"the request's KV could not be moved: {self._public or cause}"
        self._live.stream.fail(Unavailable(said, retry_after_s=self._hub.timings.retry_s))
        self._engine.scheduler.cancel(request.handle)
        self._engine.abort(request.handle)

    def _close(self) -> None:
        if self._work is not None:
            self._work.close()
        if self._source is not None:
            self._prompts.part(self._prompt.handle)
        self._hub.over(self)
