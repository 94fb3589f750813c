"""Attention of a whole grid of ranks, from plan to output, without a model: each row is compared with dense float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cp_layout.cuts import cut, kv_head_cut
from cp_layout.interleave import NOT_MINE, Layout
from cp_layout.model_shape import ModelShape
from cp_wire.pb import common_pb2, rank_pb2
from rank_server.attention.latent import UpProjection
from rank_server.attention.rows import Span
from rank_server.collectives.base import Backend, Group
from rank_server.collectives.local import LocalBackend, LocalHub
from rank_server.collectives.solo import SoloGroup
from rank_server.flows.table import Ways
from rank_server.kv_pool import KvPool
from rank_server.place import Place
from rank_server.sequences import SequenceTable
from rank_server.step_batch import commit, hold, take_in
from tests.inproc import Shape
from tests.rank_server.attention.dense import dense_attention
from tests.rank_server.collectives.harness import open_groups
from tests.rank_server.threads import run_ranks

HEAD_DIM = 4
GATHERS = {
    "none": common_pb2.GATHER_NONE,
    "q": common_pb2.GATHER_Q,
    "kv": common_pb2.GATHER_KV,
    "kv_all": common_pb2.GATHER_KV_ALL,
}


@dataclass
class Known:
    """A request: q [L, H, dq] and what is stored, K and V [L, KVH, D] each, of all the tokens it will ever have."""

    q: Tensor
    stored: tuple[Tensor, ...]
    tables: list[list[int]]
    offset: int
    computed: int = 0


@dataclass
class Rank:
    """What one thread holds."""

    place: Place
    pool: KvPool
    groups: dict[str, Group]
    ways: Ways
    sequences: SequenceTable = field(default_factory=SequenceTable)

    def group(self, kind: str) -> Group:
        name = self.place.group_name(kind)
        return self.groups.get(name, SoloGroup(name))

    def calls(self) -> int:
        return sum(group.calls for group in self.groups.values())


class FlowCluster:
    """Ranks of a shape; requests are made by `add` and computed by `step`, which checks every row that any rank computes."""

    def __init__(self, shape: Shape, heads: int = 4, kv_heads: int = 2, tolerance: float = 2e-6, blocks: int = 512) -> None:
        self.model = self.build_model(heads, kv_heads)
        self.shape = shape
        self.layout = Layout(shape.dcp, shape.interleave, shape.block_size)
        self.requests: list[Known] = []
        self._tolerance = tolerance
        self.generator = torch.Generator().manual_seed(5)
        self._free = [np.random.default_rng(member).permutation(blocks).tolist() for member in range(shape.dcp)]
        places = [Place.of(shape.config(), rank, self.model) for rank in range(shape.tp * shape.pcp)]
        self.grid = places[0].grid
        named = {name: list(ranks) for name, ranks in self.grid.named_groups().items() if len(ranks) > 1}
        opened = open_groups(self.backends(len(places)), named)
        self.ranks = [self._rank(place, opened[place.rank], blocks) for place in places]

    def build_model(self, heads: int, kv_heads: int) -> ModelShape:
        """One layer of grouped-query attention."""
        return ModelShape("llama", 1, heads * HEAD_DIM, heads, kv_heads, HEAD_DIM, 8, 16, 4096, 1e-5, 100.0, False, "float32")

    def backends(self, ranks: int) -> Sequence[Backend]:
        """How the ranks exchange."""
        hub = LocalHub()
        return [LocalBackend(hub) for _ in range(ranks)]

    def random(self, *sizes: int) -> Tensor:
        """Normal, seeded."""
        return torch.randn(*sizes, generator=self.generator)

    def drawn(self, length: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Queries of so many tokens, and what is stored of them."""
        heads, kv_heads = self.model.num_heads, self.model.num_kv_heads
        q, k, v = (self.random(length, count, HEAD_DIM) for count in (heads, kv_heads, kv_heads))
        return q, (k, v)

    def ups(self, place: Place) -> Sequence[UpProjection]:
        """What a rank makes keys and values of latents with, by layer."""
        return ()

    def caches(self, pool: KvPool) -> Sequence[Tensor]:
        """[slots, heads, D] of each kind of row that a pool stores."""
        return [cache.flatten(0, 1) for cache in pool.cache(0)]

    def wanted(self, place: Place, q: Tensor, stored: Sequence[Tensor], visible: Tensor) -> Tensor:
        """[t, H, dv] float64 output of queries [t, H, dq], of which query i sees the first visible[i] tokens."""
        k, v = (x.to(place.dtype).to(place.kv_dtype) for x in stored)
        return dense_attention(q.to(place.dtype), k, v, visible, HEAD_DIM**-0.5)[0]

    def add(self, length: int) -> int:
        """A request with random tensors for this many tokens, admitted with the next step that has a row of it."""
        offset = len(self.requests) % self.shape.dcp
        self.requests.append(Known(*self.drawn(length), [[] for _ in range(self.shape.dcp)], offset))
        return len(self.requests) - 1

    def step(self, counts: dict[int, int], gather: str, prefill: Sequence[int] = (), owner: int | None = None) -> None:
        """Computes the next `counts` tokens of the requests. prefill: those that are not decodes yet when admitted."""
        plan = rank_pb2.StepPlan(decode_mode=common_pb2.DECODE_MODE_OWNER, gather=GATHERS[gather])
        for handle, count in counts.items():
            request = self.requests[handle]
            if request.computed == 0:
                plan.admitted.add(
                    handle=handle,
                    shard_offset=request.offset,
                    owner=handle % self.shape.pcp if owner is None else owner,
                    num_prefill_tokens=prefill[handle],
                )
            row = plan.rows.add(handle=handle, start=request.computed, token_ids=[0] * count)
            for member in range(self.shape.dcp):
                shard = self.layout.shard_on(member, request.offset)
                missing = self.layout.blocks_needed(shard, request.computed + count) - len(request.tables[member])
                new = [self._free[member].pop() for _ in range(missing)]
                request.tables[member] += new
                row.new_block_ids.extend(new)
                row.new_block_counts.append(missing)
        before = [rank.calls() for rank in self.ranks]
        computed = run_ranks(len(self.ranks), lambda rank: self._forward(self.ranks[rank], plan))
        assert len({rank.calls() - calls for rank, calls in zip(self.ranks, before, strict=True)}) == 1, "unequal collectives"
        self._check_everything_is_computed_once(plan, computed)
        for rank, (spans, out) in zip(self.ranks, computed, strict=True):
            self._check_rows(rank, plan, spans, out)
        for handle, count in counts.items():
            self.requests[handle].computed += count

    def check_caches(self, only_owner: Sequence[int] = ()) -> None:
        """What each rank's slots hold: its tokens, and NaN where no token is. only_owner: tokens that one replica alone has."""
        for rank in self.ranks:
            written = torch.zeros(rank.pool.num_blocks * self.shape.block_size, dtype=torch.bool)
            heads = slice(*kv_head_cut(self.model.num_kv_heads, self.grid.tp, rank.place.tp_index))
            caches = self.caches(rank.pool)
            for handle, request in enumerate(self.requests):
                last = only_owner[handle] if only_owner and rank.place.pcp_index != self._owner(handle) else request.computed
                table = np.array(request.tables[rank.place.member], dtype=np.int64)
                shard = self.layout.shard_on(rank.place.member, request.offset)
                slots = self.layout.slots(shard, table, np.arange(last))
                mine = torch.from_numpy(slots)[slots != NOT_MINE]
                written[mine] = True
                for cache, known in zip(caches, request.stored, strict=True):
                    wanted = known[:last][torch.from_numpy(slots != NOT_MINE)][:, heads].to(rank.place.dtype).to(cache.dtype)
                    assert torch.equal(cache[mine], wanted), f"rank {rank.place.rank}, request {handle}"
            for cache in caches:
                assert torch.equal(~cache.isnan().flatten(1).any(1), written), f"rank {rank.place.rank}"

    def _owner(self, handle: int) -> int:
        return self.ranks[0].sequences.get(handle).owner

    def _rank(self, place: Place, groups: dict[str, Group], blocks: int) -> Rank:
        spec = self.model.kv_spec(self.grid.tp)
        pool = KvPool(1, blocks, self.shape.block_size, spec.heads, spec.width, place.kv_dtype, "cpu", spec.rows)
        pool.fill_nan(range(blocks))
        name = place.group_name

        def group(kind: str) -> Group:
            return groups.get(name(kind), SoloGroup(name(kind)))

        ways = Ways(place, pool, group, self.model, self.ups(place), self.shape.workspace_bytes)
        return Rank(place, pool, groups, ways)

    def _forward(self, rank: Rank, plan: rank_pb2.StepPlan) -> tuple[tuple[Span, ...], Tensor]:
        place = rank.place
        take_in(plan, rank.sequences, place.layout, place.member)
        rows = hold(plan, rank.sequences, place.layout, place.member)
        share, flow = rank.ways.of(plan, rows, rank.sequences)
        q_heads = slice(*cut(self.model.num_heads, self.grid.tp, place.tp_index))
        kv_heads = slice(*kv_head_cut(self.model.num_kv_heads, self.grid.tp, place.tp_index))
        kinds = range(len(self.requests[0].stored))
        q = self._rows(plan, share.spans, lambda request: request.q)[:, q_heads]
        stored = [self._rows(plan, share.spans, lambda request, i=i: request.stored[i])[:, kv_heads] for i in kinds]
        out = flow.attend(0, q.to(place.dtype), *(x.to(place.dtype) for x in stored))
        commit(plan, rank.sequences)
        return share.spans, out

    def _rows(self, plan: rank_pb2.StepPlan, spans: Sequence[Span], of: Callable[[Known], Tensor]) -> Tensor:
        """The tokens of the spans, one span after the other, out of one tensor of their requests."""
        parts = [of(self.requests[plan.rows[span.row].handle])[span.start : span.start + span.count] for span in spans]
        return torch.cat([of(self.requests[0])[:0], *parts])

    def _check_everything_is_computed_once(
        self, plan: rank_pb2.StepPlan, computed: Sequence[tuple[tuple[Span, ...], Tensor]]
    ) -> None:
        first_tp_members = [spans for rank, (spans, _) in zip(self.ranks, computed, strict=True) if rank.place.tp_index == 0]
        tokens = sorted(
            (span.row, position)
            for spans in first_tp_members
            for span in spans
            for position in range(span.start, span.start + span.count)
        )
        assert tokens == [
            (index, position)
            for index, row in enumerate(plan.rows)
            for position in range(row.start, row.start + len(row.token_ids))
        ]

    def _check_rows(self, rank: Rank, plan: rank_pb2.StepPlan, spans: Sequence[Span], out: Tensor) -> None:
        first, last = cut(self.model.num_heads, self.grid.tp, rank.place.tp_index)
        at = 0
        for span in spans:
            request = self.requests[plan.rows[span.row].handle]
            end = span.start + span.count
            visible, known = torch.arange(span.start + 1, end + 1), [x[:end] for x in request.stored]
            wanted = self.wanted(rank.place, request.q[span.start : end], known, visible)[:, first:last]
            error = (out[at : at + span.count].double() - wanted).abs().amax((1, 2))
            assert (error <= self._tolerance).all(), f"rank {rank.place.rank}, {span}: error per query {error.tolist()}"
            at += span.count
        assert at == len(out)
