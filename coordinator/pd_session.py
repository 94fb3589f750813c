"""Leads one request from the set that computes its prompt to the one that computes its output, as `coordinator.pd` says."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from coordinator import pd
from coordinator.engine import Engine
from coordinator.kv_mover import End, KvMover, MoveError
from coordinator.pd import Passage, Phase, advance
from coordinator.rank_link import RankLink
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
        self._mover: KvMover | None = None
        self._events: deque[pd.Event] = deque()
        self._busy = False
        self._moving: asyncio.Task[Any] | None = None
        self._renewing: asyncio.Task[Any] | None = None
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
        """Ends the request after a fault of the coordinator itself, before anything of it moves."""
        request = self._live.request
        log.error("a request could not be handed over", exc=error, request=request.request_id, session=request.handle)
        self._live.stream.fail(Internal(f"the request could not be handed over ({type(error).__name__})"))
        self._events.clear()
        if self._source is None:
            self.state = replace(self.state, prefill_holds=False)
        self._engine.scheduler.cancel(request.handle)
        self._engine.abort(request.handle)

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
                self.state, actions = advance(self.state, self._events.popleft())
                for action in actions:
                    self._do(action)
        finally:
            self._busy = False
        if self.state.phase is Phase.OVER:
            self._close()

    def _do(self, action: pd.Action) -> None:
        handle = self._live.request.handle
        match action:
            case pd.Prefill():
                self._prefill()
            case pd.Move(start, end, attempt):
                self._moving = self._spawn(self._move(start, end, attempt), "moving")
                self._renewing = self._renewing or self._spawn(self._renew(), "prolonging")
            case pd.StopMove():
                if self._moving is not None:
                    self._moving.cancel()
                self._spawn(self._stop(), "stopping")
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
                self._stop_renewing()
                self._spawn(self._end(), "releasing")
            case pd.ForgetMoves():
                assert self._mover is not None
                self._spawn(self._mover.end_pulls(), "forgetting")
            case pd.FreePrefill():
                self._prompts.scheduler.end_lease(handle)
                self._prompts.wake()

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
        self._mover = KvMover(self._prompt.handle, source_end, self._target_end, self._hub.timings)
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

    async def _move(self, start: int, end: int, attempt: int) -> None:
        assert self._mover is not None
        if attempt > 1:
            await asyncio.sleep(self._hub.timings.move_again_s * 2 ** (attempt - 2))
        began = perf_counter()
        try:
            answers = await self._mover.move(start, end)
        except MoveError as error:
            log.warning(
                "KV did not come over",
                request=self._live.request.request_id,
                session=self._prompt.handle,
                tokens=f"[{start}, {end})",
                attempt=attempt,
                cause=error.cause,
                why=str(error),
            )
            self._handle(pd.MoveFailed(error.cause, error.transient))
            return
        except Exception as error:
            log.error("a move failed", exc=error, session=self._prompt.handle)
            self._handle(pd.MoveFailed("INTERNAL", False))
            return
        self._hub.stats.moved(answers, perf_counter() - began)
        self._handle(pd.Moved())

    async def _renew(self) -> None:
        """Until cancelled: a chunk may take longer to compute than a lease lasts."""
        assert self._mover is not None
        while True:
            await asyncio.sleep(self._hub.timings.lease_s / 3)
            await self._mover.renew()

    async def _stop(self) -> None:
        """Until every target rank has said that it writes nothing more, or the target's epoch is over, which says the same."""
        assert self._mover is not None and self._target_end is not None
        epoch = self._target_end.epoch
        await self._insist(self._mover.end_pulls, self._home, lambda: self._home.epoch == epoch)
        self._handle(pd.MoveStopped())

    async def _end(self) -> None:
        """Until every source rank has said that nothing is read any more, or the set is lost, and with it what it held."""
        assert self._mover is not None and self._source is not None
        await self._mover.end_pulls()
        await self._insist(self._mover.end_leases, self._source, lambda: self.state.prefill_holds)
        self._handle(pd.LeaseEnded())

    async def _insist(self, ask: Callable[[], Awaitable[list[RankLink]]], side: RankSet, matters: Callable[[], bool]) -> None:
        """Asks until all ranks have done it, or it matters no more. One that is silent for too long is fenced: its blocks would
        never be free again."""
        limit_s = self._hub.timings.pull_s
        until = perf_counter() + limit_s
        while (silent := await ask()) and matters():
            if perf_counter() >= until:
                for link in silent:
                    side.fence(link, f"it has not ended a transfer for {limit_s:g} s")
            await asyncio.sleep(self._hub.timings.retry_s)

    def _spawn(self, work: Coroutine[Any, Any, Any], what: str) -> "asyncio.Task[Any]":
        return self._hub.background.spawn(work, f"{what} request {self._prompt.handle}")

    def _stop_renewing(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()

    def _close(self) -> None:
        self._stop_renewing()
        if self._source is not None:
            self._prompts.part(self._prompt.handle)
        self._hub.over(self)
