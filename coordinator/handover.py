"""The way of all requests in a cluster whose prompts and outputs are computed by different sets."""

from collections.abc import Callable, Mapping, Sequence

from coordinator.kv_mover import End
from coordinator.pd_session import PdSession
from coordinator.rank_set import RankSet
from coordinator.request import Request
from coordinator.scheduler_types import QueueFull
from coordinator.tasks import Background
from coordinator.text_rows import LiveRequest
from coordinator.timings import Timings
from coordinator.transfer_stats import TransferStats
from cp_wire.sides import Side


class Handover:
    """Queues of requests that have no place on their output's set yet, by set, and what all sessions share.

    recompute: whether a request whose KV can't be moved is computed where its output is, instead of failing.
    """

    def __init__(
        self,
        sources: Sequence[RankSet],
        sides: Mapping[str, Side],
        recompute: bool,
        max_waiting: int,
        timings: Timings,
        on_failure: Callable[[str, Exception], None],
    ) -> None:
        """sources: sets that compute prompts. sides: by role."""
        self._sources = sources
        self._sides = sides
        self._max_waiting = max_waiting
        self._queues: dict[RankSet, dict[int, PdSession]] = {}
        self.recompute = recompute
        self.timings = timings
        self.stats = TransferStats()
        self.background = Background(on_failure)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place on their output's set."""
        return sum(len(queue) for queue in self._queues.values())

    def submit(self, home: RankSet, lives: Sequence[LiveRequest]) -> None:
        """Queues the completions of a prompt, all or none; raises QueueFull. home: where their output is computed."""
        queue = self._queues.setdefault(home, {})
        if len(queue) + len(lives) > self._max_waiting:
            raise QueueFull(len(queue), len(lives), self._max_waiting)
        for live in lives:
            session = PdSession(live, home, self)
            live.relay = session
            queue[live.request.handle] = session
            home.serving.expect(live)
        self.pump(home)

    def pump(self, home: RankSet) -> None:
        """Gives places to the front of a set's queue; a completion that waits for its prompt lets others pass.

        A fault of one session ends that one alone.
        """
        queue = self._queues.get(home, {})
        for session in list(queue.values()):
            request = session.live.request
            if request.handle not in queue:
                continue
            try:
                cached = home.serving.scheduler.reserve(request)
                if cached is not None:
                    del queue[request.handle]
                    session.reserved(cached)
            except Exception as error:
                queue.pop(request.handle, None)
                session.broken(error)
                continue
            if cached is None and not request.follows:
                break

    def over(self, session: PdSession) -> None:
        """The session holds nothing any more."""
        for queue in self._queues.values():
            queue.pop(session.live.request.handle, None)

    def pick_source(self) -> RankSet | None:
        """The set with the fewest prompts; None when none serves."""
        ready = [source for source in self._sources if source.ready]
        return min(ready, key=lambda source: source.serving.load) if ready else None

    def end(self, home: RankSet, request: Request) -> End:
        """Where a request lies on a set, in the set's present epoch."""
        scheduler = home.serving.scheduler
        return End(
            spec=home.spec,
            side=self._sides[home.spec.role],
            links=home.links,
            epoch=home.epoch,
            columns=lambda member, columns: scheduler.columns(request, member, columns),
            shard_offset=lambda: request.shard_offset,
        )

    async def close(self) -> None:
        """Ends all sessions' calls."""
        await self.background.cancel()
