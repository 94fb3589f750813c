"""What only the in-process backend can promise: members that disagree are named."""

import pytest
import torch
from torch import Tensor

from rank_server.collectives.base import CollectiveError, Group
from tests.rank_server.collectives.harness import Implementation
from tests.rank_server.threads import run_ranks


def errors_of(groups: list[Group], calls: dict[int, tuple[str, Tensor]]) -> list[str]:
    def member_main(member: int) -> str:
        op, x = calls[member]
        with pytest.raises(CollectiveError) as caught:
            getattr(groups[member], op)(x)
        return str(caught.value)

    return run_ranks(len(groups), member_main, deadline_s=5.0)


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (("all_reduce", torch.zeros(3, 4)), "all_reduce of torch.float32 [3, 4]"),
        (("all_gather", torch.zeros(3, 5)), "all_gather of torch.float32 [3, 5]"),
        (("all_gather", torch.zeros(3, 4, dtype=torch.bfloat16)), "all_gather of torch.bfloat16 [3, 4]"),
        (("all_to_all", torch.zeros(3, 4)), "all_to_all of torch.float32 [3, 4]"),
    ],
    ids=["op", "shape", "dtype", "op and meaning of the shape"],
)
def test_d10_members_that_disagree_all_raise_naming_both_calls(odd: tuple[str, Tensor], named: str) -> None:
    groups = Implementation("local", 3).open()
    usual = ("all_gather", torch.zeros(3, 4))
    for message in errors_of(groups, {0: usual, 1: odd, 2: usual}):
        assert "all_gather of torch.float32 [3, 4]" in message
        assert named in message
        assert "member 1" in message or "member 0" in message


def test_d10_members_that_disagree_about_the_root() -> None:
    groups = Implementation("local", 2).open()

    def member_main(member: int) -> str:
        with pytest.raises(CollectiveError) as caught:
            groups[member].broadcast(torch.zeros(1), member)
        return str(caught.value)

    for message in run_ranks(2, member_main, deadline_s=5.0):
        assert "broadcast from 0" in message
        assert "broadcast from 1" in message


def test_a_member_may_run_ahead_of_slow_readers() -> None:
    groups = Implementation("local", 2).open()

    def member_main(member: int) -> list[float]:
        return [float(groups[member].broadcast(torch.tensor(float(i)), 0)) for i in range(200)]

    assert run_ranks(2, member_main) == [[float(i) for i in range(200)]] * 2
