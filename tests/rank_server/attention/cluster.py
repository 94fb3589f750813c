"""Attention of a whole grid of ranks in one process: each thread holds its heads, its pool and its groups."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cp_layout.cuts import cut, kv_head_cut
from cp_layout.grid import Grid
from cp_layout.interleave import NOT_MINE, Layout
from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.attention.dcp_gqa import DcpAttention
from rank_server.collectives.base import Group
from rank_server.collectives.local import LocalBackend, LocalHub
from rank_server.collectives.solo import SoloGroup
from rank_server.kv_pool import KvPool
from tests.rank_server.attention.dense import dense_attention
from tests.rank_server.collectives.harness import open_groups
from tests.rank_server.threads import run_ranks

HEAD_DIM = 4
SCALE = HEAD_DIM**-0.5
DECODES = 2


@dataclass(frozen=True)
class Setup:
    """A configuration and the lengths of its prompts."""

    grid: Grid
    heads: int
    kv_heads: int
    interleave: int
    block_size: int
    merge: str
    lengths: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    q_replicate: bool = False

    def __str__(self) -> str:
        g = self.grid
        return (
            f"tp{g.tp}-pcp{g.pcp}-dcp{g.dcp}-h{self.heads}/{self.kv_heads}-I{self.interleave}-B{self.block_size}-{self.merge}"
        )

    @property
    def layout(self) -> Layout:
        return Layout(self.grid.dcp, self.interleave, self.block_size)


@dataclass(frozen=True)
class Request:
    """q [L, H, D], k and v [L, KVH, D] of all its tokens; block ids per member of the DCP group."""

    q: Tensor
    k: Tensor
    v: Tensor
    shard_offset: int
    tables: list[list[int]]


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of a request in a step."""

    request: Request
    start: int
    end: int


@dataclass
class Rank:
    """What one thread holds."""

    setup: Setup
    rank: int
    pool: KvPool
    attention: DcpAttention
    groups: tuple[Group, Group]
    outputs: list[Tensor] = field(default_factory=list)

    def heads(self) -> slice:
        """The query heads this rank brings into attention."""
        tp, d = self.setup.grid.coords(self.rank).tp, self.setup.grid.dcp_in_tp
        if self.setup.q_replicate:
            return slice(
                cut(self.setup.heads, self.setup.grid.tp, tp // d * d)[0],
                cut(self.setup.heads, self.setup.grid.tp, tp // d * d + d - 1)[1],
            )
        return slice(*cut(self.setup.heads, self.setup.grid.tp, tp))

    def forward(self, step: Sequence[Chunk]) -> Tensor:
        setup, layout = self.setup, self.setup.layout
        member, tp = setup.grid.dcp_member(self.rank), setup.grid.coords(self.rank).tp
        kv = slice(*kv_head_cut(setup.kv_heads, setup.grid.tp, tp))
        rows, slots, visible = [], [], []
        for chunk in step:
            shard = layout.shard_on(member, chunk.request.shard_offset)
            table = np.array(chunk.request.tables[member], dtype=np.int64)
            positions = np.arange(chunk.start, chunk.end)
            seen = layout.local_lens_at(shard, positions + 1)
            q_start = sum(row.q_len for row in rows)
            rows.append(AttentionRow(q_start, len(positions), torch.from_numpy(table), int(seen[-1]), int(seen[0])))
            slots.append(layout.slots(shard, table, positions))
            visible.append(seen)
        batch = AttentionBatch(tuple(rows), *(torch.from_numpy(np.concatenate(x)) for x in (slots, visible)))
        q, k, v = (
            torch.cat([getattr(chunk.request, name)[chunk.start : chunk.end] for chunk in step]).to(setup.dtype)
            for name in "qkv"
        )
        return self.attention.forward(0, q[:, self.heads()], k[:, kv], v[:, kv], batch)


def make_requests(setup: Setup) -> tuple[list[Request], int]:
    """Requests with random tensors and scattered block tables, and the blocks each member's pool needs."""
    generator = torch.Generator().manual_seed(11)
    layout, n = setup.layout, setup.grid.dcp
    numbers = [iter(np.random.default_rng(member).permutation(4096).tolist()) for member in range(n)]
    used = [0] * n
    counts = []
    for index, length in enumerate(setup.lengths):
        total = length + DECODES
        needed = [layout.blocks_needed(layout.shard_on(member, index % n), total) for member in range(n)]
        used = [have + more for have, more in zip(used, needed, strict=True)]
        counts.append((total, needed))
    num_blocks = max(used) + 1
    free = [[b for b in number if b < num_blocks] for number in numbers]
    requests = []
    for index, (total, needed) in enumerate(counts):
        q = torch.randn(total, setup.heads, HEAD_DIM, generator=generator)
        k, v = (torch.randn(total, setup.kv_heads, HEAD_DIM, generator=generator) for _ in range(2))
        tables = [[free[member].pop() for _ in range(count)] for member, count in enumerate(needed)]
        requests.append(Request(q, k, v, index % n, tables))
    return requests, num_blocks


def make_ranks(setup: Setup, num_blocks: int) -> list[Rank]:
    """Every rank with a pool full of NaN and its groups open."""
    grid = setup.grid
    groups = {f"q:{i}": ranks for i, ranks in enumerate(grid.q_groups())} | {
        f"dcp:{i}": ranks for i, ranks in enumerate(grid.dcp_groups())
    }
    hub = LocalHub()
    opened = open_groups([LocalBackend(hub) for _ in range(grid.world_size)], groups)
    ranks = []
    for rank in range(grid.world_size):
        q_group = next((group for name, group in opened[rank].items() if name.startswith("q:")), SoloGroup("q"))
        dcp_group = next((group for name, group in opened[rank].items() if name.startswith("dcp:")), SoloGroup("dcp"))
        first, last = kv_head_cut(setup.kv_heads, grid.tp, grid.coords(rank).tp)
        pool = KvPool(1, num_blocks, setup.block_size, last - first, HEAD_DIM, setup.dtype, "cpu")
        pool.fill_nan(range(num_blocks))
        pcp = 1 if grid.dcp == 1 else grid.pcp
        attention = DcpAttention(pool, q_group, dcp_group, setup.merge, SCALE, pcp, setup.q_replicate)
        ranks.append(Rank(setup, rank, pool, attention, (q_group, dcp_group)))
    return ranks


def schedule(requests: Sequence[Request]) -> list[list[Chunk]]:
    """Steps that mix first chunks, chunks with context and decodes; every other request starts a step later."""
    steps: list[list[Chunk]] = []
    for index, request in enumerate(requests):
        length = len(request.q) - DECODES
        bounds = sorted({0, (length + 1) // 2, *range(length, length + DECODES + 1)})
        for number, (start, end) in enumerate(itertools.pairwise(bounds), start=index % 2):
            while len(steps) <= number:
                steps.append([])
            steps[number].append(Chunk(request, start, end))
    return [step for step in steps if step]


def check(setup: Setup, tolerance: float = 2e-6) -> None:
    """Runs the schedule on all ranks and compares every query row of every rank with dense float64 attention."""
    requests, num_blocks = make_requests(setup)
    ranks = make_ranks(setup, num_blocks)
    steps = schedule(requests)
    run_ranks(len(ranks), lambda rank: ranks[rank].outputs.extend(ranks[rank].forward(step) for step in steps))
    for number, step in enumerate(steps):
        wanted = torch.cat([dense_chunk(chunk, setup.dtype) for chunk in step])
        for rank in ranks:
            got = rank.outputs[number]
            first, last = cut(setup.heads, setup.grid.tp, setup.grid.coords(rank.rank).tp)
            assert got.dtype == setup.dtype
            assert got.shape == (wanted.shape[0], last - first, HEAD_DIM)
            error = (got.double() - wanted[:, first:last]).abs().amax((1, 2))
            assert (error <= tolerance).all(), f"{setup}: rank {rank.rank}, step {number}, error per query {error.tolist()}"
            twin = ranks[setup.grid.coords(rank.rank).tp].outputs[number]
            assert torch.equal(got, twin), f"{setup}: replicas differ, rank {rank.rank}, step {number}"
    check_canaries(setup, requests, ranks)


def dense_chunk(chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """[t, H, D] float64 from tensors rounded to the dtype."""
    q, k, v = (x.to(dtype) for x in (chunk.request.q[chunk.start : chunk.end], chunk.request.k, chunk.request.v))
    return dense_attention(q, k, v, torch.arange(chunk.start + 1, chunk.end + 1), SCALE)[0]


def check_canaries(setup: Setup, requests: Sequence[Request], ranks: Sequence[Rank]) -> None:
    """Slots that no token of the member owns still hold the NaN they were filled with."""
    layout = setup.layout
    for rank in ranks:
        member = setup.grid.dcp_member(rank.rank)
        written = torch.zeros(rank.pool.num_blocks * setup.block_size, dtype=torch.bool)
        for request in requests:
            shard = layout.shard_on(member, request.shard_offset)
            slots = layout.slots(shard, np.array(request.tables[member], dtype=np.int64), np.arange(len(request.q)))
            written[torch.from_numpy(slots[slots != NOT_MINE])] = True
        for cache in rank.pool.cache(0):
            assert torch.equal(~cache.flatten(0, 1).isnan().flatten(1).any(1), written)
