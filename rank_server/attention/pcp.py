"""Exchange of rows between replicas that compute different rows of one step.

Nothing here depends on what a row holds. Members send equally many rows, as many as the fullest replica has; what stands in the
surplus is never read.
"""

import torch
from torch import Tensor

from cp_layout.zigzag import Partition
from rank_server.collectives.base import Group


class RowExchange:
    """The T ≥ 1 rows of a partition over P replicas, from the point of view of one of them.

    partition: of exactly the rows that are exchanged, the same on all ranks. Batch order is that of its token numbers g.
    """

    def __init__(self, partition: Partition, replica: int, device: torch.device) -> None:
        self.replicas = partition.num_members
        self.width = partition.rows_max
        """Rows that each replica sends."""
        self.count = int(partition.counts[replica])
        """Rows that are this replica's own."""
        self._restore = torch.from_numpy(partition.restore_padded).to(device)
        self._senders = torch.from_numpy(partition.padded_tokens.reshape(-1).clip(0)).to(device)

    def padded(self, x: Tensor) -> Tensor:
        """[count, *s] → [width, *s]."""
        if self.count == self.width:
            return x
        return torch.cat([x, x.new_zeros((self.width - self.count, *x.shape[1:]), device=x.device)])

    def own(self, x: Tensor) -> Tensor:
        """[width, *s] → [count, *s]: undoes `padded`."""
        return x[: self.count]

    def in_batch_order(self, gathered: Tensor) -> Tensor:
        """[P, width, *s] of all replicas → [T, *s]."""
        return gathered.flatten(0, 1).index_select(0, self._restore)

    def by_replica(self, x: Tensor) -> Tensor:
        """[T, *s] → [P, width, *s]: each replica's rows, as it sent them."""
        return x.index_select(0, self._senders).unflatten(0, (self.replicas, self.width))

    def gather(self, group: Group, x: Tensor) -> Tensor:
        """[count, *s] of each replica → [T, *s]; group: one rank of each replica, in their order."""
        return self.in_batch_order(group.all_gather(self.padded(x)))
