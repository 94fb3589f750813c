"""What attention and models ask of a group of ranks.

Contract, the same for every backend and tested by one suite: every member calls the same operations in the same order with
equal shapes and dtypes (callers pad to sizes that the plan names); results are bit-identical on all members; sums are taken
in fp32 and returned in the input's dtype; inputs are never modified; results never alias inputs, but where they are lent; a
member that is missing or late makes the others raise `CollectiveError` within the group's timeout, after which the group is
poisoned.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class CollectiveError(RuntimeError):
    """A collective failed or timed out; the group can't be used again. The message names group, operation and cause."""


class Group(Protocol):
    """One open group, seen by one of its members."""

    name: str
    size: int
    index: int
    calls: int
    """Collectives issued on this member since the group was opened."""
    seconds: float
    """Time that this member has spent in collectives; only ever grows. It includes waiting for other members."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[*s] on every member → [N, *s], member order."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """[*s] → [*s]: the sum over members."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[N, *s] → [*s]: the sum over members of their chunk `index`."""
        ...

    def all_to_all(self, x: Tensor) -> Tensor:
        """[N, *s] → [N, *s]: chunk j goes to member j; result chunk j came from member j."""
        ...

    def all_to_all_lent(self, *xs: Tensor) -> Sequence[Sequence[Tensor]]:
        """Of each x [N, *s], all of one dtype, the N chunks of `all_to_all`, not copied where that can be helped: they may lie
        in x, and where others write later on.

        So nobody writes to them, and they are read before this member's next call.
        """
        ...

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """[*s] → [*s]: member `root`'s x; the others' x gives shape and dtype only."""
        ...

    def barrier(self) -> None:
        """Returns when every member has called it."""
        ...

    def set_timeout(self, seconds: float) -> None:
        """Bound for every following operation."""
        ...

    def close(self) -> None:
        """Frees the member's resources; never waits for other members; may be called twice and from another thread, and
        then makes a running operation raise as soon as the backend allows."""
        ...


class Backend(Protocol):
    """Opens groups."""

    def prepare(self, name: str, ranks: Sequence[int]) -> bytes:
        """Called on the member with index 0 before anybody opens; returns bootstrap bytes for `open`."""
        ...

    def open(self, name: str, ranks: Sequence[int], rank: int, bootstrap: bytes, timeout_s: float) -> Group:
        """Called on every member (ranks in group order); waits for all of them, at most timeout_s."""
        ...
