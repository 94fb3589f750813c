"""Partials that travel packed or apart."""

import pytest
import torch

from rank_server.attention import group_merge
from rank_server.attention.group_merge import APART_BYTES, merge_a2a
from rank_server.attention.move_program import packed
from tests.rank_server.collectives.harness import Implementation
from tests.rank_server.threads import run_ranks

HEADS, WIDTH = 3, 64


@pytest.mark.parametrize("members", [Implementation("local", 3), Implementation("shm", 2)], ids=str)
def test_partials_apart_are_merged_to_the_same_bits(members: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    n = members.size
    rows = -(-APART_BYTES // (4 * n * HEADS * WIDTH)) * n
    parts = [
        (torch.randn(rows, HEADS, WIDTH, generator=generator), torch.randn(rows, HEADS, generator=generator))
        for generator in (torch.Generator().manual_seed(member) for member in range(n))
    ]
    parts[0][1][::5] = -torch.inf
    parts[0][0][::5] = torch.nan

    def merged() -> list[torch.Tensor]:
        groups = members.open()

        def member(index: int) -> torch.Tensor:
            def chunks(x: torch.Tensor) -> torch.Tensor:
                return x.unflatten(0, (n, -1))

            return merge_a2a(groups[index], *parts[index], chunks)

        results = run_ranks(n, member)
        assert {group.calls for group in groups} == {1}
        return results

    packings = []

    def noted(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        packings.append(out.shape)
        return packed(out, lse)

    monkeypatch.setattr(group_merge, "packed", noted)
    apart = merged()
    assert not packings
    monkeypatch.setattr(group_merge, "APART_BYTES", 1 << 40)
    together = merged()
    assert len(packings) == n
    for one, other in zip(apart, together, strict=True):
        assert one.shape == (rows // n, HEADS, WIDTH)
        assert torch.equal(one, other) and one.isfinite().all()
