"""A group of one member: every collective is the identity, so callers need no special case."""

from torch import Tensor

from rank_server.collectives.exchange import ExchangeGroup

NO_DEADLINE = float("inf")
"""Timeout of a group that never waits."""


class SoloGroup(ExchangeGroup):
    """The `Group` of a member that is alone; results are copies, as the contract wants."""

    def __init__(self, name: str) -> None:
        super().__init__(name, size=1, index=0, timeout_s=NO_DEADLINE)

    def _gather(self, op: str, x: Tensor) -> Tensor:
        return x.clone().unsqueeze(0)

    def _swap(self, op: str, x: Tensor) -> Tensor:
        return x.clone()

    def _copy(self, x: Tensor, root: int) -> Tensor:
        return x.clone()

    def _meet(self) -> None:
        return

    def _release(self, reason: str) -> None:
        return
