"""Queries travel: everybody attends its own shard for all rows, partials go back to whoever computes the row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rank_server.attention.batch import AttentionBatch
from rank_server.attention.group_merge import GroupMerge
from rank_server.attention.pcp import RowExchange
from rank_server.attention.shard import ShardAttention
from rank_server.attention.side_by_side import side_by_side
from rank_server.collectives.base import Group


@dataclass(frozen=True, slots=True)
class GatherQWay:
    """One all-gather of [q‖kv], the merge's collectives back.

    Member t·P + p of the DCP group is member t of the d TP members that share the keys, on replica p.
    """

    attention: ShardAttention
    batch: AttentionBatch
    """All replicas' rows over this rank's shard, in gather order."""
    exchange: RowExchange
    dcp_group: Group
    merge: GroupMerge

    def complete(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See `Way`."""
        heads = q.shape[1]
        rows = self.exchange.gather(self.dcp_group, side_by_side(self.attention.leaving(layer, q), kv))
        by_tp_member = rows.split(self.exchange.replicas * self.exchange.width)
        # The d members bring their own heads, and all the same KV rows.
        self.attention.write(layer, by_tp_member[0][:, heads:], self.batch.slots)
        queries = [part[:, :heads] for part in by_tp_member]
        all_heads = torch.cat(queries, dim=1) if len(queries) > 1 else queries[0]
        out, lse = self.attention.paged(layer, all_heads, self.batch)
        own = self.exchange.own(self.merge(self.dcp_group, out, lse, self._chunks))
        return self.attention.arrived(layer, own).to(q.dtype)

    def _chunks(self, x: Tensor) -> Tensor:
        """[P·width, d·hq, E] in gather order → [N, width, hq, E]."""
        p = self.exchange.replicas
        by_heads = x.unflatten(0, (p, -1)).unflatten(2, (self.dcp_group.size // p, -1))
        return by_heads.movedim(2, 0).flatten(0, 1)
