"""What the members of a group receive of a sum is what is predicted of it."""

import pytest
import torch

from cp_layout.sums import SCATTERED_SUM_BYTES, received
from rank_server.collectives.local import LocalGroup
from tests.rank_server.collectives.harness import Implementation
from tests.rank_server.threads import run_ranks


@pytest.mark.parametrize("size", [2, 3, 4])
def test_of_a_sum(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, counts = Implementation("local", size).open(), [0] * size
    gather, swap = LocalGroup._gather, LocalGroup._swap

    def counted_gather(group: LocalGroup, op: str, x: torch.Tensor) -> torch.Tensor:
        counts[group.index] += (size - 1) * x.nbytes
        return gather(group, op, x)

    def counted_swap(group: LocalGroup, op: str, x: torch.Tensor) -> torch.Tensor:
        counts[group.index] += (size - 1) * x.nbytes // size
        return swap(group, op, x)

    monkeypatch.setattr(LocalGroup, "_gather", counted_gather)
    monkeypatch.setattr(LocalGroup, "_swap", counted_swap)
    for rows in (1, SCATTERED_SUM_BYTES // 48 - 1, SCATTERED_SUM_BYTES // 48 + 1):
        x = torch.zeros(rows, 12)  # chunks of equal size, whatever the number of members
        counts[:] = [0] * size
        run_ranks(size, lambda member: groups[member].all_reduce(x))  # noqa: B023
        assert counts == [received(size, x.nbytes)] * size, rows
