"""Latent attention whose latents are spread over a decode context parallel (DCP) group; the `gather_q` way."""

import torch
from torch import Tensor

from cp_layout.model_shape import MlaShape
from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.attention.latent import UpProjection, expanding_pays
from rank_server.attention.mla import expanded_partial, latent_partial
from rank_server.attention.shard_merge import ShardMerge
from rank_server.collectives.base import Group
from rank_server.kv_pool import KvPool


class DcpLatentAttention:
    """Attention of one rank: absorbed query heads gathered over the TP members of the DCP group, partials merged over it.

    pool: this rank's latents; q_group, dcp_group, merge, pcp: see `ShardMerge`. What comes back is projected to values after
    the merge, but before it where every member has the same heads (d = 1) and values are narrower than latents. Alone (N = 1)
    a long row is attended with expanded keys where that is cheaper.
    """

    def __init__(
        self, pool: KvPool, q_group: Group, dcp_group: Group, merge: str, scale: float, pcp: int, shape: MlaShape
    ) -> None:
        self._pool = pool
        self._q_group = q_group
        self._merge = ShardMerge(q_group, dcp_group, merge, pcp)
        self._alone = dcp_group.size == 1
        self._shape = shape
        self._scale = scale
        self._project_first = q_group.size == 1 and shape.v_head_dim < shape.kv_lora_rank

    def forward(self, layer: int, q: Tensor, latents: Tensor, up: UpProjection, batch: AttentionBatch) -> Tensor:
        """Stores latents [T, dc + dr] where this shard owns them and returns the attention output [T, h, dv] in q's dtype.

        q: [T, h, dn + dr], this rank's heads. CollectiveError when a member is lost.
        """
        self._pool.write_latents(layer, latents, batch.slots)
        cache = self._pool.latents(layer)
        if self._alone:
            return self._attend_alone(q, cache, up, batch).to(q.dtype)
        absorbed = up.absorb(q)
        gathered = absorbed if self._q_group.size == 1 else self._q_group.all_gather(absorbed).transpose(0, 1).flatten(1, 2)
        out, lse = latent_partial(gathered, cache, self._shape.kv_lora_rank, batch, self._scale)
        if self._project_first:
            return self._merge(up.values(out).to(torch.float32), lse).to(q.dtype)
        return up.values(self._merge(out, lse)).to(q.dtype)

    def _attend_alone(self, q: Tensor, cache: Tensor, up: UpProjection, batch: AttentionBatch) -> Tensor:
        out = q.new_empty((*q.shape[:2], self._shape.v_head_dim))
        absorbed: list[AttentionRow] = []
        for row in batch.rows:
            if not expanding_pays(self._shape, row.q_len):
                absorbed.append(row)
                continue
            rows = slice(row.q_start, row.q_start + row.q_len)
            out[rows] = expanded_partial(q[rows], cache, row, batch.visible[rows], up, self._scale)[0].to(q.dtype)
        if absorbed:
            where = torch.cat([torch.arange(r.q_start, r.q_start + r.q_len, device=q.device) for r in absorbed])
            rest = AttentionBatch(tuple(absorbed), batch.slots, batch.visible)
            partial, _ = latent_partial(up.absorb(q), cache, self._shape.kv_lora_rank, rest, self._scale)
            out[where] = up.values(partial[where]).to(q.dtype)
        return out
