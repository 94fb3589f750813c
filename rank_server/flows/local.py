"""Ways of a cache that is not sharded (dcp = 1)."""

from dataclasses import dataclass

from torch import Tensor

from rank_server.attention.batch import AttentionBatch
from rank_server.attention.pcp import RowExchange
from rank_server.attention.shard import ShardAttention
from rank_server.collectives.base import Group


@dataclass(frozen=True, slots=True)
class LocalWay:
    """The owner alone writes and attends: no collective."""

    attention: ShardAttention
    batch: AttentionBatch
    """This replica's rows."""

    def complete(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See `Way`."""
        self.attention.write(layer, kv, self.batch.slots)
        return self.attention.local(layer, q, self.batch).to(q.dtype)


@dataclass(frozen=True, slots=True)
class ReplicatedKvWay:
    """New KV rows go to every replica, which writes them all; attention is local."""

    attention: ShardAttention
    batch: AttentionBatch
    """This replica's rows."""
    slots: Tensor
    """[P·width] slots of all replicas' rows, in gather order."""
    exchange: RowExchange
    pcp_group: Group

    def complete(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See `Way`."""
        everybodys = self.exchange.gather(self.pcp_group, kv.to(self.attention.kv_dtype))
        self.attention.write(layer, everybodys, self.slots)
        return self.attention.local(layer, q, self.batch).to(q.dtype)
