"""Which flow a plan asks for."""

from collections.abc import Callable, Sequence

from cp_layout.grid import Grid
from cp_layout.model_shape import ModelShape
from cp_layout.reorg import WORKSPACE_BYTES
from cp_wire.pb import common_pb2, rank_pb2
from rank_server.attention.dcp_gqa import DcpAttention
from rank_server.attention.dcp_mla import DcpLatentAttention
from rank_server.attention.latent import UpProjection
from rank_server.attention.latent_shard import LatentShard
from rank_server.attention.rows import KvRow, attention_batch
from rank_server.attention.shard import GqaShard, ShardAttention
from rank_server.collectives.base import Group
from rank_server.flows.base import Flow
from rank_server.flows.owner import OwnerFlows
from rank_server.flows.replicated import ReplicatedFlow
from rank_server.kv_pool import KvPool
from rank_server.place import Place
from rank_server.sequences import PlanRefused, SequenceTable
from rank_server.share import Share, replicated, split

REPLICATED, OWNER = common_pb2.DECODE_MODE_REPLICATED, common_pb2.DECODE_MODE_OWNER
SPLIT = common_pb2.DECODE_MODE_SPLIT
NONE, Q, KV = common_pb2.GATHER_NONE, common_pb2.GATHER_Q, common_pb2.GATHER_KV
KV_ALL = common_pb2.GATHER_KV_ALL


def check_way(plan: rank_pb2.StepPlan, grid: Grid) -> None:
    """Raises `PlanRefused` for a decode mode and gather that the grid can't do."""
    known = [(REPLICATED, NONE)]
    if grid.pcp > 1:
        known += [(SPLIT, NONE)]
    if grid.pcp > 1 or grid.dcp > 1:
        known += [(OWNER, NONE), (OWNER, KV)]
    if grid.dcp > 1:
        known += [(OWNER, Q), (OWNER, KV_ALL)]
    if (plan.decode_mode, plan.gather) not in known:
        raise PlanRefused(
            f"decode mode {plan.decode_mode} with gather {plan.gather} is not supported with pcp {grid.pcp}, dcp {grid.dcp}"
        )


class Ways:
    """All the flows of one rank over its pool and its open groups.

    group: the rank's group of a kind; ups: of each layer, with latent attention.
    """

    def __init__(
        self,
        place: Place,
        pool: KvPool,
        group: Callable[[str], Group],
        shape: ModelShape,
        ups: Sequence[UpProjection],
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        self._place = place
        self._latent = shape.mla is not None
        self._device = pool.device
        pcp = 1 if place.grid.dcp == 1 else place.grid.pcp
        groups = (group("q"), group("dcp"))
        attention: ShardAttention
        self._replicated: DcpAttention | DcpLatentAttention
        if shape.mla is None:
            self._replicated = DcpAttention(pool, *groups, place.merge, shape.score_scale, pcp)
            attention = GqaShard(pool, shape.score_scale)
        else:
            attention = LatentShard(pool, shape.mla, shape.score_scale, ups, one_set_of_heads=place.grid.dcp_in_tp == 1)
            self._replicated = DcpLatentAttention(attention, *groups, place.merge, pcp)
        self._owner = OwnerFlows(place, attention, group, workspace_bytes, self._device)

    def of(self, plan: rank_pb2.StepPlan, rows: Sequence[KvRow], sequences: SequenceTable) -> tuple[Share, Flow]:
        """The rank's share of a plan and the flow through which its rows go; a pure function of the plan and the place.

        `PlanRefused` when the plan does not say how its prefill rows are completed, or asks a cache for tokens it lacks.
        """
        place = self._place
        if plan.decode_mode == SPLIT and self._latent:
            raise PlanRefused("replicas can't split passes of a model with latent attention")
        if plan.decode_mode == OWNER:
            owners = [self._owner_of(row, sequences) for row in plan.rows]
            if plan.gather == NONE and None in owners:
                raise PlanRefused(f"request {plan.rows[owners.index(None)].handle} prefills in a step that gathers nothing")
            return self._owner.of(rows, owners, queries_travel=plan.gather == Q, keys_to_all=plan.gather == KV_ALL)
        for row in plan.rows:
            if place.grid.dcp == 1 and sequences.get(row.handle).decoded_by_owner:
                raise PlanRefused(
                    f"request {row.handle}: only replica {sequences.get(row.handle).owner} has its decoded tokens"
                )
        everybody = split if plan.decode_mode == SPLIT else replicated
        share = everybody(rows, place.grid.pcp, place.pcp_index)
        return share, ReplicatedFlow(self._replicated.forward, attention_batch(rows, share.spans, place.layout, self._device))

    def _owner_of(self, row: rank_pb2.StepRow, sequences: SequenceTable) -> int | None:
        """The replica that computes a decode row, None for a prefill row."""
        sequence = sequences.get(row.handle)
        if row.start < sequence.num_prefill_tokens:
            return None
        if sequence.owner >= self._place.grid.pcp:
            raise PlanRefused(f"request {row.handle}: replica {sequence.owner} of {self._place.grid.pcp} owns it")
        return sequence.owner
