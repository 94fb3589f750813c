"""Grouped-query attention whose KV is spread over a decode context parallel (DCP) group."""

from torch import Tensor

from rank_server.attention.batch import AttentionBatch
from rank_server.attention.kernels import kernels_for
from rank_server.attention.move_program import rounded
from rank_server.attention.shard_merge import ShardMerge
from rank_server.collectives.base import Group
from rank_server.kv_pool import KvPool


class DcpAttention:
    """Attention of one rank: query heads gathered over the TP members of the DCP group, partials merged over the whole group.

    pool: this rank's cache; q_group, dcp_group, merge, pcp: see `ShardMerge`; q_replicate: the query projection gives every
    member the heads of the whole q_group already. Which collectives run depends on these and on the batch's shape only, never
    on what this shard owns.

    Raises ValueError when the groups do not fit together, for an unknown merge, and for q_replicate with d = 1.
    """

    def __init__(
        self,
        pool: KvPool,
        q_group: Group,
        dcp_group: Group,
        merge: str,
        scale: float,
        pcp: int,
        q_replicate: bool = False,
    ) -> None:
        self._merge = ShardMerge(q_group, dcp_group, merge, pcp)
        if q_replicate and q_group.size == 1:
            raise ValueError("replicated query projections need d > 1 TP members in a DCP group, got d = 1")
        self._pool = pool
        self._kernels = kernels_for(pool.device)
        self._q_group = q_group
        self._scale = scale
        self._gather_q = q_group.size > 1 and not q_replicate

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        """Stores k, v [T, hk, D] where this shard owns them and returns the attention output [T, hq, D] in q's dtype.

        q: [T, hq, D], this rank's heads; [T, d·hq, D] with q_replicate. CollectiveError when a member is lost.
        """
        self._pool.write(layer, k, v, batch.slots)
        k_cache, v_cache = self._pool.cache(layer)
        gathered = self._q_group.all_gather(q).transpose(0, 1).flatten(1, 2) if self._gather_q else q
        out, lse = self._kernels.paged(gathered, k_cache, v_cache, batch, self._scale)
        return rounded(self._merge(out, lse), q.dtype)
