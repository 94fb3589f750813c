"""The calls that bring the KV of one request from the ranks of one set to those of another."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.cluster import SchedulingSet
from coordinator.rank_link import RankLink
from coordinator.tasks import all_or_first_error
from coordinator.timings import Timings
from cp_wire.errors import KvloomError, Stale
from cp_wire.logs import get_logger
from cp_wire.pb import kv_transfer_pb2, rank_pb2
from cp_wire.sides import Side

log = get_logger("coordinator.pd")


@dataclass(frozen=True, slots=True)
class End:
    """One end of a request's way: the ranks of a set in one of its epochs, and where the request lies there."""

    spec: SchedulingSet
    side: Side
    links: Mapping[int, RankLink]
    """By global rank."""
    epoch: int
    columns: Callable[[int, range], Sequence[int]]
    """Blocks in some columns of the request's block table on a pool member."""
    shard_offset: Callable[[], int]

    def shard_of(self, rank: int) -> int:
        """Shard of the request that a rank holds."""
        return self.side.layout.shard_on(self.spec.member_of(rank), self.shard_offset())

    def index_of(self, rank: int) -> int:
        """The rank inside its DP index."""
        return self.spec.ranks.index(rank)


class MoveError(Exception):
    """A range that did not come over. cause: a stable upper-case word; `str()` may name peers and is for the log."""

    def __init__(self, rank: int, cause: str, transient: bool, message: str) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.cause = cause
        self.transient = transient


class KvMover:
    """One session: leases on all source ranks, pulls on the target ranks that need something. One range at a time.

    Every call has a deadline. session: unique over the life of the cluster.
    """

    def __init__(self, session: int, source: End, target: End, timings: Timings) -> None:
        self._session = session
        self._source = source
        self._target = target
        self._timings = timings
        self._attempt = 0
        self._tokens = 0
        self._columns = dict.fromkeys(source.links, 0)
        """Per source rank, columns of its block table that are leased."""

    @property
    def target_epoch(self) -> int:
        """Of the target's ranks, when they were given blocks to write to."""
        return self._target.epoch

    async def move(self, start: int, end: int) -> list[rank_pb2.PullResponse]:
        """Returns when tokens [start, end) are written and verified on every rank that holds some of them; else MoveError.

        After an error some ranks may go on writing; a further `move` stops them first, `end_pulls` for good.
        """
        tokens = max(self._tokens, end)
        columns = self._committed_columns(tokens)
        await self._lease(tokens, columns)
        self._tokens, self._columns = tokens, columns
        self._attempt += 1
        return await all_or_first_error(self._pull(link, start, end) for link in self._readers(start, end))

    def _committed_columns(self, tokens: int) -> dict[int, int]:
        """Per source rank, columns that hold the tokens that may be read: the rest belongs to a step that may not have reached
        the ranks yet, and would make the blocks look handed out again."""
        source = self._source
        return {rank: source.side.layout.blocks_needed(source.shard_of(rank), tokens) for rank in source.links}

    async def renew(self) -> None:
        """Prolongs the leases; what can't be reached is left to expire."""
        try:
            await self._lease(self._tokens, self._columns)
        except MoveError as error:
            log.warning("a lease was not prolonged", session=self._session, why=str(error))

    async def end_pulls(self) -> list[RankLink]:
        """Target ranks that have not said that they write nothing of the session any more."""

        async def end(link: RankLink) -> None:
            await link.end_pull(
                rank_pb2.EndPullRequest(session=self._session, epoch=self._target.epoch), self._timings.beside_s
            )

        return await self._not_ended(self._target, end)

    async def end_leases(self) -> list[RankLink]:
        """Source ranks that have not said that nothing of the session is read any more that a target would believe."""

        async def end(link: RankLink) -> None:
            await link.end_lease(
                rank_pb2.EndLeaseRequest(session=self._session, epoch=self._source.epoch), self._timings.beside_s
            )

        return await self._not_ended(self._source, end)

    async def _lease(self, tokens: int, columns: Mapping[int, int]) -> None:
        """Leases [0, tokens) in so many columns per rank; tells the ranks those that are new."""
        targets = range(len(self._target.spec.ranks))
        source = self._source

        async def one(link: RankLink) -> None:
            new = range(self._columns[link.rank], columns[link.rank])
            request = rank_pb2.LeaseRequest(
                epoch=source.epoch,
                session=self._session,
                shard_offset=source.shard_offset(),
                first_column=new.start,
                # A set that is lost has no table of the request any more, and nothing to name in it either.
                block_ids=source.columns(source.spec.member_of(link.rank), new) if new else (),
                tokens=tokens,
                target_ranks=targets,
                ttl_ms=round(1000 * self._timings.lease_s),
            )
            try:
                await link.lease(request, self._timings.beside_s)
            except KvloomError as error:
                raise MoveError(link.rank, error.reason, error.retryable, f"no lease: {error.message}") from error

        await all_or_first_error(one(link) for link in source.links.values())

    def _readers(self, start: int, end: int) -> list[RankLink]:
        """Ranks of the target that hold tokens of the range."""
        return [link for link in self._target.links.values() if self._written(link.rank, start, end)]

    def _written(self, rank: int, start: int, end: int) -> range:
        """Columns of a target rank's block table in which the range is written."""
        return self._target.side.layout.columns(self._target.shard_of(rank), start, end)

    async def _pull(self, link: RankLink, start: int, end: int) -> rank_pb2.PullResponse:
        source, target = self._source, self._target
        columns = self._written(link.rank, start, end)
        request = rank_pb2.PullRequest(
            epoch=target.epoch,
            session=self._session,
            attempt=self._attempt,
            source_epoch=source.epoch,
            source=_side_message(source.side, source.shard_offset()),
            sources=[
                rank_pb2.PullSource(rank=source.index_of(each.rank), address=each.address, instance=each.instance)
                for each in source.links.values()
            ],
            shard_offset=target.shard_offset(),
            start=start,
            end=end,
            first_column=columns.start,
            block_ids=target.columns(target.spec.member_of(link.rank), columns),
            timeout_ms=round(1000 * self._timings.pull_s),
        )
        try:
            response = await link.pull(request, self._timings.pull_s + self._timings.beside_s)
        except KvloomError as error:
            raise MoveError(link.rank, error.reason, error.retryable, error.message) from error
        if response.HasField("failure"):
            failure = response.failure
            raise MoveError(link.rank, failure.reason, failure.transient, failure.message)
        return response

    async def _not_ended(self, side: End, end: Callable[[RankLink], Awaitable[None]]) -> list[RankLink]:
        """Ranks that have not ended their part; one of another epoch has nothing left of the session."""

        async def one(link: RankLink) -> bool:
            try:
                await end(link)
            except Stale:
                return True
            except KvloomError as error:
                log.warning("a transfer was not ended", session=self._session, rank=link.rank, why=error.message)
                return False
            except Exception as error:
                # A fault of this process says as little as silence: the rank may still write or read.
                log.error("a transfer was not ended", exc=error, session=self._session, rank=link.rank)
                return False
            return True

        links = list(side.links.values())
        ended = await asyncio.gather(*(one(link) for link in links))
        return [link for link, done in zip(links, ended, strict=True) if not done]


def _side_message(side: Side, shard_offset: int) -> kv_transfer_pb2.KvSide:
    config = side.config
    return kv_transfer_pb2.KvSide(
        tp=config.tp,
        pcp=config.pcp,
        dcp=config.dcp,
        interleave=config.interleave,
        block_size=config.block_size,
        shard_offset=shard_offset,
    )
