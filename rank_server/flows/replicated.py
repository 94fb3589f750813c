"""Every replica computes every row; partial attention is merged over the shards."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rank_server.attention.batch import AttentionBatch
from rank_server.attention.dcp_gqa import DcpAttention
from rank_server.attention.dcp_mla import DcpLatentAttention


@dataclass(frozen=True, slots=True)
class ReplicatedFlow:
    """`Flow` of a step whose rows are everywhere."""

    attention: DcpAttention | DcpLatentAttention
    batch: AttentionBatch

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Any) -> Tensor:
        """See `Flow`."""
        return self.attention.forward(layer, q, k, v, self.batch)
