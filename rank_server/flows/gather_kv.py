"""Keys travel: every replica attends all keys for its own rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rank_server.attention.context import ContextPiece
from rank_server.attention.merge import merge_partials
from rank_server.attention.pcp import RowExchange
from rank_server.attention.shard import ShardAttention
from rank_server.collectives.base import Group


@dataclass(frozen=True, slots=True)
class OwnRow:
    """What this replica computes of one row: one or two runs that stand together."""

    row: int
    """Index of the row in its step."""
    queries: slice
    """Among this replica's rows."""
    keys: slice
    """The row's new tokens up to the last of the runs, among those of all replicas in batch order."""
    seen: Tensor
    """[queries] int64 how many of those keys each query sees, its own included."""


@dataclass(frozen=True, slots=True)
class GatherKvWay:
    """One all-gather of the new KV rows over the PCP group, then one of the DCP group for each piece of cached context."""

    attention: ShardAttention
    slots: Tensor
    """[T] slots of all replicas' rows on this rank's shard, in batch order."""
    own_rows: Sequence[OwnRow]
    context: Sequence[ContextPiece]
    exchange: RowExchange
    pcp_group: Group
    dcp_group: Group

    def complete(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See `Way`. New keys are rounded as if they came out of the cache."""
        new = self.exchange.in_batch_order(self.exchange.gather(self.pcp_group, kv.to(self.attention.kv_dtype)))
        self.attention.write(layer, new, self.slots)
        parts = {}
        for own in self.own_rows:
            queries = q[own.queries]
            parts[own.row] = (*self.attention.dense(layer, queries, new[own.keys], own.seen), queries)
        for piece in self.context:
            gathered = self.dcp_group.all_gather(self.attention.read(layer, piece.slots)).flatten(0, 1)
            for use in piece.uses:
                out, lse, queries = parts[use.row]
                more_out, more_lse = self.attention.dense(layer, queries, use.out_of(gathered), None)
                parts[use.row] = (*merge_partials([out, more_out], torch.stack([lse, more_lse])), queries)
        if not parts:
            return self.attention.dense(layer, q, new[:0], None)[0].to(q.dtype)
        outs = [out.to(q.dtype) for out, _, _ in parts.values()]
        return outs[0] if len(outs) == 1 else torch.cat(outs)
