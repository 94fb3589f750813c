"""Latent attention whose latents are spread over a decode context parallel (DCP) group, every replica with the same rows."""

from torch import Tensor

from rank_server.attention.batch import AttentionBatch
from rank_server.attention.latent_shard import LatentShard
from rank_server.attention.shard_merge import ShardMerge
from rank_server.collectives.base import Group


class DcpLatentAttention:
    """Attention of one rank: absorbed query heads gathered over the TP members of the DCP group, partials merged over it.

    q_group, dcp_group, merge, pcp: see `ShardMerge`.
    """

    def __init__(self, attention: LatentShard, q_group: Group, dcp_group: Group, merge: str, pcp: int) -> None:
        self._attention = attention
        self._q_group = q_group
        self._merge = ShardMerge(q_group, dcp_group, merge, pcp)
        self._alone = dcp_group.size == 1

    def forward(self, layer: int, q: Tensor, latents: Tensor, batch: AttentionBatch) -> Tensor:
        """Stores latents [T, 1, dc + dr] where this shard owns them; q [T, h, dn + dr] → output [T, h, dv] in q's dtype.

        CollectiveError when a member is lost.
        """
        self._attention.write(layer, latents, batch.slots)
        if self._alone:
            return self._attention.local(layer, q, batch).to(q.dtype)
        leaving = self._attention.leaving(layer, q)
        gathered = leaving if self._q_group.size == 1 else self._q_group.all_gather(leaving).transpose(0, 1).flatten(1, 2)
        merged = self._merge(*self._attention.paged(layer, gathered, batch))
        return self._attention.arrived(layer, merged).to(q.dtype)
