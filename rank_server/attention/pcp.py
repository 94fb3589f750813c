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

    partition: of exactly the rows that are exchanged, the same on all ranks. Batch order is that of its token numbers g; in
    gather order, member after member, each one's rows are followed by its surplus.
    """

    def __init__(self, partition: Partition, replica: int, device: torch.device) -> None:
        self.replicas = partition.num_members
        self.width = partition.rows_max
        """Rows that each replica sends."""
        self.count = int(partition.counts[replica])
        """Rows that are this replica's own."""
        self._restore = torch.from_numpy(partition.restore_padded).to(device)

    def padded(self, x: Tensor) -> Tensor:
        """[count, *s] → [width, *s]."""
        if self.count == self.width:
            return x
        return torch.cat([x, x.new_zeros((self.width - self.count, *x.shape[1:]), device=x.device)])

    def own(self, x: Tensor) -> Tensor:
        """[width, *s] → [count, *s]: undoes `padded`."""
        return x[: self.count]

    def gather(self, group: Group, x: Tensor) -> Tensor:
        """[count, *s] of each replica → [P·width, *s] in gather order; group: one rank of each replica, in their order."""
        return group.all_gather(self.padded(x)).flatten(0, 1)

    def in_batch_order(self, gathered: Tensor) -> Tensor:
        """[P·width, *s] in gather order → [T, *s]."""
        return gathered.index_select(0, self._restore)
