"""Every replica computes every row; partial attention is merged over the shards."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rank_server.attention.batch import AttentionBatch


@dataclass(frozen=True, slots=True)
class ReplicatedFlow:
    """`Flow` of a step whose rows are everywhere."""

    forward: Callable[..., Tensor]
    """(layer, q, what a token stores, batch) → output: `DcpAttention.forward` or `DcpLatentAttention.forward`."""
    batch: AttentionBatch

    def attend(self, layer: int, q: Tensor, *rows: Tensor) -> Tensor:
        """See `Flow`."""
        return self.forward(layer, q, *rows, self.batch)
