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

Tables = Sequence[Sequence[int]]
"""Per pool member, a request's block table."""


@dataclass(frozen=True, slots=True)
class End:
    """One end of a request's way: the ranks of a set in one of its epochs, and where the request lies there."""

    spec: SchedulingSet
    side: Side
    links: Mapping[int, RankLink]
    """By global rank."""
    epoch: int
    tables: Callable[[], Tables]
    shard_offset: Callable[[], int]

    def table_of(self, rank: int) -> Sequence[int]:
        """Block table of the request on a rank."""
        return self.tables()[self.spec.member_of(rank)]

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
        self._columns = [0] * source.side.layout.num_shards
        """Per pool member, columns of the block table that are leased."""

    async def move(self, start: int, end: int) -> list[rank_pb2.PullResponse]:
        """Returns when tokens [start, end) are written and verified on every rank that holds some of them; else MoveError.

        After an error some ranks may go on writing; a further `move` stops them first, `end_pulls` for good.
        """
        self._tokens = max(self._tokens, end)
        tables = self._committed_tables()
        await self._lease(tables)
        self._columns = [len(table) for table in tables]
        self._attempt += 1
        return await all_or_first_error(self._pull(link, start, end) for link in self._readers(start, end))

    def _committed_tables(self) -> Tables:
        """The source's tables as far as they hold the tokens that may be read: the rest belongs to a step that may not have
        reached the ranks yet, and would make the blocks look handed out again."""
        layout, offset = self._source.side.layout, self._source.shard_offset()
        return [
            table[: layout.blocks_needed(layout.shard_on(member, offset), self._tokens)]
            for member, table in enumerate(self._source.tables())
        ]

    async def renew(self) -> None:
        """Prolongs the leases; what can't be reached is left to expire."""
        try:
            await self._lease([()] * len(self._columns))
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

    async def _lease(self, tables: Tables) -> None:
        targets = range(len(self._target.spec.ranks))
        source = self._source

        async def one(link: RankLink) -> None:
            member = source.spec.member_of(link.rank)
            table = tables[member]
            first = min(self._columns[member], len(table))
            request = rank_pb2.LeaseRequest(
                epoch=source.epoch,
                session=self._session,
                shard_offset=source.shard_offset(),
                first_column=first,
                block_ids=table[first:],
                tokens=self._tokens,
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
        spec, layout = self._target.spec, self._target.side.layout
        shards = {rank: layout.shard_on(spec.member_of(rank), self._target.shard_offset()) for rank in spec.ranks}
        return [
            link
            for rank, link in self._target.links.items()
            if layout.local_len(shards[rank], end) > layout.local_len(shards[rank], start)
        ]

    async def _pull(self, link: RankLink, start: int, end: int) -> rank_pb2.PullResponse:
        source, target = self._source, self._target
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
            block_ids=target.table_of(link.rank),
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
