"""Grouped-query attention whose KV is spread over a decode context parallel (DCP) group."""

import torch
from torch import Tensor

from rank_server.attention.batch import AttentionBatch
from rank_server.attention.kernels import kernels_for
from rank_server.attention.merge import merge_partials, scaled, shares
from rank_server.collectives.base import Group
from rank_server.kv_pool import KvPool


class DcpAttention:
    """Attention of one rank: query heads gathered over the TP members of the DCP group, partials merged over the whole group.

    pool: this rank's cache; q_group: the d members of one replica that share a DCP group; dcp_group: all N members, index
    (t mod d)·pcp + p; pcp: replicas in the DCP group (1 when N = 1); merge: `a2a` (one all-to-all of out‖lse, merged at the
    receiver) or `ag_rs` (all-gather of lse, scaling, reduce-scatter over heads); q_replicate: the query projection gives every
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
        d, n = q_group.size, dcp_group.size
        if n != pcp * d or dcp_group.index // pcp != q_group.index:
            raise ValueError(
                f"member {dcp_group.index} of DCP group {dcp_group.name} ({n}) does not fit member {q_group.index} of "
                f"query group {q_group.name} (d = {d}) with pcp = {pcp}: need N = pcp·d, and index // pcp = query index"
            )
        if merge not in ("a2a", "ag_rs"):
            raise ValueError(f"merge {merge!r} is not one of a2a, ag_rs")
        if q_replicate and d == 1:
            raise ValueError(f"replicated query projections need d > 1 TP members in a DCP group, got d = {d}")
        self._pool = pool
        self._kernels = kernels_for(pool.cache(0)[0].device)
        self._q_group = q_group
        self._dcp_group = dcp_group
        self._merge = self._merge_a2a if merge == "a2a" else self._merge_ag_rs
        self._scale = scale
        self._pcp = pcp
        self._gather_q = d > 1 and not q_replicate

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        """Stores k, v [T, hk, D] where this shard owns them and returns the attention output [T, hq, D] in q's dtype.

        q: [T, hq, D], this rank's heads; [T, d·hq, D] with q_replicate. CollectiveError when a member is lost.
        """
        self._pool.write(layer, k, v, batch.slots)
        k_cache, v_cache = self._pool.cache(layer)
        gathered = self._q_group.all_gather(q).transpose(0, 1).flatten(1, 2) if self._gather_q else q
        out, lse = self._kernels.paged(gathered, k_cache, v_cache, batch, self._scale)
        if self._dcp_group.size > 1:
            out = self._merge(out, lse)
        return out.to(q.dtype)

    def _merge_a2a(self, out: Tensor, lse: Tensor) -> Tensor:
        partial = torch.cat([out, lse.unsqueeze(-1)], dim=-1)
        received = self._dcp_group.all_to_all(self._chunks(partial))
        return merge_partials(received[..., :-1], received[..., -1])[0]

    def _merge_ag_rs(self, out: Tensor, lse: Tensor) -> Tensor:
        weights, _ = shares(self._dcp_group.all_gather(lse))
        return self._dcp_group.reduce_scatter(self._chunks(scaled(out, weights[self._dcp_group.index])))

    def _chunks(self, x: Tensor) -> Tensor:
        """[T, d·hq, E] → [N, T, hq, E]: member j gets the heads of query member j // pcp."""
        tokens, heads, width = x.shape
        d = self._q_group.size
        by_member = x.view(tokens, d, heads // d, width).transpose(0, 1)
        return by_member.repeat_interleave(self._pcp, dim=0) if self._pcp > 1 else by_member.contiguous()
