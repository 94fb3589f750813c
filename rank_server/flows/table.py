"""Which flow a plan asks for."""

from collections.abc import Callable, Sequence

from cp_layout.grid import Grid
from cp_layout.model_shape import ModelShape
from cp_wire.pb import common_pb2, rank_pb2
from rank_server.attention.dcp_gqa import DcpAttention
from rank_server.attention.dcp_mla import DcpLatentAttention
from rank_server.attention.rows import KvRow, attention_batch
from rank_server.collectives.base import Group
from rank_server.flows.base import Flow
from rank_server.flows.replicated import ReplicatedFlow
from rank_server.kv_pool import KvPool
from rank_server.place import Place
from rank_server.sequences import PlanRefused, SequenceTable
from rank_server.share import Share, replicated


def check_way(plan: rank_pb2.StepPlan, grid: Grid) -> None:
    """Raises `PlanRefused` for a decode mode and gather that the grid can't do."""
    if plan.decode_mode != common_pb2.DECODE_MODE_REPLICATED or plan.gather != common_pb2.GATHER_NONE:
        raise PlanRefused(f"decode mode {plan.decode_mode} with gather {plan.gather} is not supported")


class Ways:
    """All the flows of one rank over its pool and its open groups. group: the rank's group of a kind."""

    def __init__(self, place: Place, pool: KvPool, group: Callable[[str], Group], shape: ModelShape) -> None:
        self._place = place
        self._device = pool.device
        pcp = 1 if place.grid.dcp == 1 else place.grid.pcp
        groups = (group("q"), group("dcp"))
        self._replicated: DcpAttention | DcpLatentAttention
        if shape.mla is None:
            self._replicated = DcpAttention(pool, *groups, place.merge, shape.score_scale, pcp)
        else:
            self._replicated = DcpLatentAttention(pool, *groups, place.merge, shape.score_scale, pcp, shape.mla)

    def of(self, plan: rank_pb2.StepPlan, rows: Sequence[KvRow], sequences: SequenceTable) -> tuple[Share, Flow]:
        """The rank's share of a plan and the flow through which its rows go; a pure function of the plan and the place."""
        place = self._place
        share = replicated(rows, place.grid.pcp, place.pcp_index)
        return share, ReplicatedFlow(self._replicated, attention_batch(rows, share.spans, place.layout, self._device))
