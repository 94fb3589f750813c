"""What runs in the background for one request between two sets: its moves, the lease that covers them, and the end of both."""

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from coordinator import pd
from coordinator.insist import insist
from coordinator.kv_mover import KvMover, MoveError
from coordinator.rank_set import RankSet
from coordinator.request import Request
from cp_wire.logs import get_logger

if TYPE_CHECKING:
    from coordinator.handover import Handover

log = get_logger("coordinator.pd")


class PdWork:
    """Background work of one session. What comes of it goes to `tell`, a fault that nobody expected to `broken`, and to
    `endless` where the work was to end a transfer: its end will not be told."""

    def __init__(
        self,
        prompt: Request,
        mover: KvMover,
        source: RankSet,
        home: RankSet,
        hub: "Handover",
        tell: Callable[[pd.Event], None],
        broken: Callable[[Exception], None],
        endless: Callable[[Exception], None],
    ) -> None:
        """prompt: as the source computes it."""
        self.mover = mover
        self._prompt = prompt
        self._source = source
        self._home = home
        self._hub = hub
        self._tell = tell
        self._broken = broken
        self._endless = endless
        self._moving: asyncio.Task[Any] | None = None
        self._renewing: asyncio.Task[Any] | None = None

    def move(self, start: int, end: int, attempt: int) -> None:
        """Brings a range over, and prolongs the lease from now on; answered by `Moved` or `MoveFailed`."""
        self._moving = self._spawn("moving", self._broken, self._move, start, end, attempt)
        self._renewing = self._renewing or self._spawn("prolonging", self._broken, self._renew)

    def stop_move(self) -> None:
        """Has all ranks stop writing; answered by `MoveStopped`."""
        if self._moving is not None:
            self._moving.cancel()
        self._spawn("stopping", self._endless, self._stop)

    def end_lease(self, holds: Callable[[], bool]) -> None:
        """Has all ranks stop reading; answered by `LeaseEnded`. holds: whether the source still has anything to end."""
        self.close()
        self._spawn("releasing", self._endless, self._end, holds)

    def forget_moves(self) -> None:
        """Tells those that wrote that there is nothing more to come; not answered."""
        self._spawn("forgetting", self._broken, self.mover.end_pulls)

    def close(self) -> None:
        """Prolongs the lease no more."""
        if self._renewing is not None:
            self._renewing.cancel()

    async def _move(self, start: int, end: int, attempt: int) -> None:
        if attempt > 1:
            await asyncio.sleep(self._hub.timings.move_again_s * 2 ** (attempt - 2))
        began = perf_counter()
        try:
            answers = await self.mover.move(start, end)
        except MoveError as error:
            log.warning(
                "KV did not come over",
                request=self._prompt.request_id,
                session=self._prompt.handle,
                tokens=f"[{start}, {end})",
                attempt=attempt,
                cause=error.cause,
                why=str(error),
            )
            self._tell(pd.MoveFailed(error.cause, error.transient))
            return
        except Exception as error:
            # As good as one that the ranks report: the policy says what becomes of the request.
            log.error("a move failed", exc=error, session=self._prompt.handle)
            self._tell(pd.MoveFailed("INTERNAL", False))
            return
        self._hub.stats.moved(answers, perf_counter() - began)
        self._tell(pd.Moved())

    async def _renew(self) -> None:
        """Until cancelled: a chunk may take longer to compute than a lease lasts."""
        while True:
            await asyncio.sleep(self._hub.timings.lease_s / 3)
            await self.mover.renew()

    async def _stop(self) -> None:
        """Until every target rank has said that it writes nothing more, or the target's epoch is over, which says the same."""
        epoch = self.mover.target_epoch
        await insist(self.mover.end_pulls, self._home.fence, lambda: self._home.epoch == epoch, self._hub.timings)
        self._tell(pd.MoveStopped())

    async def _end(self, holds: Callable[[], bool]) -> None:
        """Until every source rank has said that nothing is read any more, or the set is lost, and with it what it held."""
        await self.mover.end_pulls()
        await insist(self.mover.end_leases, self._source.fence, holds, self._hub.timings)
        self._tell(pd.LeaseEnded())

    def _spawn(
        self, what: str, at_fault: Callable[[Exception], None], work: Callable[..., Awaitable[Any]], *args: Any
    ) -> "asyncio.Task[Any]":
        async def guarded() -> None:
            try:
                await work(*args)
            except Exception as error:
                at_fault(error)

        return self._hub.background.spawn(guarded(), f"{what} request {self._prompt.handle}")
