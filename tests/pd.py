"""Two clusters in one process, each with its own layout, whose ranks talk gRPC: KV computed on one goes on on the other.

Prefill runs under the real scheduler; decode plans are made by hand, so that nothing but ranks and transfers is under test.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from coordinator.plan import Sampling
from cp_layout.reshard import Reshard, reshard
from cp_layout.reshard import Side as Layouted
from cp_wire.pb import common_pb2, rank_pb2
from kv_transfer.facts import side_message
from tests.inproc import Shape
from tests.wired import DEADLINE_S, Wired

TTL_MS = 30_000


@dataclass
class Moved:
    """A request on its way: what it has on both sides."""

    prompt: list[int]
    session: int
    source_offset: int
    target_offset: int
    source_tables: Sequence[Sequence[int]]
    """Per source member."""
    target_tables: Sequence[Sequence[int]]
    tokens: list[int] = field(default_factory=list)
    attempts: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))


@dataclass
class Pair:
    """A prefill side and a decode side."""

    source: Wired
    target: Wired
    _sessions: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _handles: "itertools.count[int]" = field(default_factory=lambda: itertools.count(10_000))
    _random: random.Random = field(default_factory=lambda: random.Random(5))

    async def begin(self, prompt: Sequence[int], room: int) -> tuple[Moved, int]:
        """Prefills the prompt up to its first token, which stays held; reserves blocks on the target for `room` more tokens."""
        moved, request = self.submit(prompt, room)
        while not self.source.generations[request.handle].token_ids:
            assert await asyncio.to_thread(self.source.step) is not None
        self.look(moved, request)
        moved.tokens.append(self.source.generations[request.handle].token_ids[0])
        return moved, request.handle

    def submit(self, prompt: Sequence[int], room: int):  # type: ignore[no-untyped-def]
        """Queues the prompt on the source and reserves on the target."""
        request = self.source.submit(prompt, Sampling(temperature=0.0, max_tokens=2))
        layout = self.target.layout
        offset = self._random.randrange(layout.num_shards)
        tables = []
        for member in range(layout.num_shards):
            columns = layout.blocks_needed(layout.shard_on(member, offset), len(prompt) + room)
            tables.append(self._random.sample(range(self.target.shape.blocks), columns))
        return Moved(list(prompt), next(self._sessions), 0, offset, (), tables), request

    def look(self, moved: Moved, request) -> None:  # type: ignore[no-untyped-def]
        """Takes over where the request lies on the source by now."""
        moved.source_offset = request.shard_offset
        moved.source_tables = [list(table) for table in self.source.scheduler._kv._sequences[request.handle].tables]

    def plan(self, moved: Moved, start: int, end: int) -> Reshard:
        source = Layouted(self.source.side.grid, self.source.layout, self.source.side.kv_heads, moved.source_offset)
        target = Layouted(self.target.side.grid, self.target.layout, self.target.side.kv_heads, moved.target_offset)
        return reshard(source, target, start, end)

    def lease_of(self, moved: Moved, rank: int, tokens: int, **changes) -> rank_pb2.LeaseRequest:  # type: ignore[no-untyped-def]
        links = self.plan(moved, 0, len(moved.prompt)).links
        fields = {
            "instance": self.source.instances[rank],
            "epoch": self.source.epoch,
            "session": moved.session,
            "shard_offset": moved.source_offset,
            "block_ids": moved.source_tables[self.source.grid.dcp_member(rank)],
            "tokens": tokens,
            "target_ranks": sorted({link.dst for link in links if link.src == rank}),
            "ttl_ms": TTL_MS,
        }
        return rank_pb2.LeaseRequest(**fields | changes)

    def sources(self, moved: Moved) -> list[int]:
        return sorted({link.src for link in self.plan(moved, 0, len(moved.prompt)).links})

    async def lease(self, moved: Moved, tokens: int | None = None, **changes) -> None:  # type: ignore[no-untyped-def]
        tokens = len(moved.prompt) if tokens is None else tokens
        calls = (
            self.source.stubs[rank].Lease(self.lease_of(moved, rank, tokens, **changes), timeout=DEADLINE_S)
            for rank in self.sources(moved)
        )
        await asyncio.gather(*calls)

    def pull_of(self, moved: Moved, rank: int, start: int, end: int, **changes) -> rank_pb2.PullRequest:  # type: ignore[no-untyped-def]
        side = Layouted(self.source.side.grid, self.source.layout, self.source.side.kv_heads, moved.source_offset)
        peers = zip(self.source.addresses, self.source.instances, strict=True)
        member = self.target.grid.dcp_member(rank)
        shard = self.target.layout.shard_on(member, moved.target_offset)
        columns = self.target.layout.columns(shard, start, end)
        fields = {
            "instance": self.target.instances[rank],
            "epoch": self.target.epoch,
            "session": moved.session,
            "attempt": next(moved.attempts),
            "source_epoch": self.source.epoch,
            "source": side_message(side),
            "sources": [rank_pb2.PullSource(rank=i, address=a, instance=name) for i, (a, name) in enumerate(peers)],
            "shard_offset": moved.target_offset,
            "start": start,
            "end": end,
            "first_column": columns.start,
            "block_ids": moved.target_tables[member][columns.start : columns.stop],
            "timeout_ms": 30_000,
        }
        return rank_pb2.PullRequest(**fields | changes)

    async def pull(self, moved: Moved, start: int = 0, end: int | None = None, **changes) -> list[rank_pb2.PullResponse]:  # type: ignore[no-untyped-def]
        """Every target rank pulls the range."""
        end = len(moved.prompt) if end is None else end
        calls = (
            stub.Pull(self.pull_of(moved, rank, start, end, **changes), timeout=DEADLINE_S)
            for rank, stub in enumerate(self.target.stubs)
        )
        return list(await asyncio.gather(*calls))

    async def end(self, moved: Moved) -> list[str]:
        """Ends the session everywhere; how it ended on the sources."""
        for rank, stub in enumerate(self.target.stubs):
            request = rank_pb2.EndPullRequest(
                instance=self.target.instances[rank], epoch=self.target.epoch, session=moved.session
            )
            await stub.EndPull(request, timeout=DEADLINE_S)
        how = []
        for rank in self.sources(moved):
            request = rank_pb2.EndLeaseRequest(
                instance=self.source.instances[rank], epoch=self.source.epoch, session=moved.session
            )
            how.append((await self.source.stubs[rank].EndLease(request, timeout=DEADLINE_S)).how)
        return how

    async def decode(self, moved: Moved, count: int) -> list[int]:
        """Goes on on the target: `count` tokens after the first one, which the source has sampled. Then drops the request."""
        length, handle = len(moved.prompt), next(self._handles)
        for step in range(count):
            row = rank_pb2.StepRow(
                handle=handle, start=length + step, token_ids=[moved.tokens[-1]], sample=True, output_index=step + 1
            )
            plan = rank_pb2.StepPlan(
                ticket=handle + step,
                timeout_ms=30_000,
                decode_mode=common_pb2.DECODE_MODE_REPLICATED,
                gather=common_pb2.GATHER_NONE,
                rows=[row],
            )
            if step == 0:
                plan.rows[0].new_block_counts.extend(len(table) for table in moved.target_tables)
                plan.rows[0].new_block_ids.extend(block for table in moved.target_tables for block in table)
                plan.admitted.add(
                    handle=handle,
                    shard_offset=moved.target_offset,
                    num_cached_tokens=length,
                    num_prompt_tokens=length,
                    num_prefill_tokens=length,
                )
            (results,) = await asyncio.to_thread(self.target.execute, plan)
            (sampled,) = [token for result in results for token in result.sampled]
            assert not sampled.error
            moved.tokens.append(sampled.token_id)
        await self.target.command(step=rank_pb2.StepPlan(
            ticket=handle + count,
            timeout_ms=30_000,
            decode_mode=common_pb2.DECODE_MODE_REPLICATED,
            gather=common_pb2.GATHER_NONE,
            released=[handle],
        ))  # fmt: skip
        return moved.tokens

    async def drop(self, handle: int) -> None:
        """The source forgets the request."""
        self.source.scheduler.abort(handle)
        while await asyncio.to_thread(self.source.step) is not None:
            pass

    def empty(self) -> None:
        """The target's pools are full of NaN again."""
        for executor in self.target.executors:
            executor.pool.fill_nan(range(self.target.shape.blocks))

    def check_nothing_is_left(self) -> None:
        for side in (self.source, self.target):
            assert [transfers.active for transfers in side.transfers] == [(0, 0)] * len(side.transfers)
        assert all(free == self.source.shape.blocks for free in self.source.scheduler.free_blocks)


@asynccontextmanager
async def pair(model: Path, source: Shape, target: Shape, **options: Any) -> AsyncIterator[Pair]:
    """Both sides, running. options: of `Wired`, for both."""
    torch.set_num_threads(1)
    running: list[Wired] = []
    try:
        for shape, name in ((source, "source"), (target, "target")):
            running.append(Wired(model, shape, name, **options))
            await running[-1].serve()
        yield Pair(*running)
    finally:
        for side in running:
            await side.stop()
