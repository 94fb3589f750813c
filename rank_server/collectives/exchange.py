"""The collectives in terms of three ways to exchange equal-sized tensors: what every backend that only moves bytes shares.

Sums are taken here, in member order, so they are the same bits on all members and under every backend.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import perf_counter
from types import TracebackType

import torch
from torch import Tensor

from cp_layout.sums import scattered
from rank_server.collectives.base import CollectiveError
from rank_server.compiled import sums
from rank_server.compiled.tape import recorder


def sum_in_member_order(parts: Tensor) -> Tensor:
    """[N, *s] → [*s] in parts' dtype: ((x0 + x1) + x2) + …, in fp32 for 16-bit floats and in the own dtype for the others.

    `parts` is used up: the sum may be taken in its place.
    """
    dtype = parts.dtype
    if parts.is_cpu and (found := sums.total(parts)) is not None:
        return found
    first, *rest = parts.unbind()
    total = first.to(torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype)
    for part in rest:
        total += part
    return total.to(dtype)


class ExchangeGroup(ABC):
    """A `Group` whose backend implements `_gather`, `_swap`, `_copy`, `_meet` and `_release`.

    They get contiguous tensors and must return new ones; what they raise as RuntimeError poisons the group. A poisoned group
    is closed, so that the other members notice at once instead of waiting for their own deadline.
    """

    recordable = False
    """Whether it notes its calls for a tape."""

    def __init__(self, name: str, size: int, index: int, timeout_s: float) -> None:
        self.name = name
        self.size = size
        self.index = index
        self.calls = 0
        self.seconds = 0.0
        self._timeout_s = timeout_s
        self._state = threading.Lock()
        self._failure: str | None = None

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Group`."""
        with self._operation("all_gather"):
            return self._gather("all_gather", x.contiguous())

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Group`. Both ways to exchange give the same bits."""
        with self._operation("all_reduce"):
            if not scattered(self.size, x.nbytes):
                return self._sum("all_reduce", x.contiguous())
            flat, padding = x.reshape(-1), -x.numel() % self.size
            if padding:
                flat = torch.cat((flat, flat.new_zeros(padding)))
            chunk = self._sum_chunks("all_reduce", flat.view(self.size, -1))
            return self._gather("all_reduce", chunk).view(-1)[: x.numel()].view(x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See `Group`; ValueError when the first dimension is not N."""
        self._check_chunks("reduce_scatter", x)
        with self._operation("reduce_scatter"):
            return self._sum_chunks("reduce_scatter", x.contiguous())

    def all_to_all(self, x: Tensor) -> Tensor:
        """See `Group`; ValueError when the first dimension is not N."""
        self._check_chunks("all_to_all", x)
        with self._operation("all_to_all"):
            return self._swap("all_to_all", x.contiguous())

    def all_to_all_lent(self, *xs: Tensor) -> Sequence[Sequence[Tensor]]:
        """See `Group`; ValueError when a first dimension is not N, or dtypes differ."""
        for x in xs:
            self._check_chunks("all_to_all_lent", x)
        if len({x.dtype for x in xs}) != 1:
            raise ValueError(f"group {self.name}: all_to_all_lent takes one dtype, got {[str(x.dtype) for x in xs]}")
        with self._operation("all_to_all_lent"):
            return self._lend("all_to_all_lent", [x.contiguous() for x in xs])

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """See `Group`; ValueError when root is not a member."""
        if not 0 <= root < self.size:
            raise ValueError(f"group {self.name}: broadcast from member {root} of {self.size}")
        with self._operation("broadcast"):
            return self._copy(x.contiguous(), root)

    def barrier(self) -> None:
        """See `Group`."""
        with self._operation("barrier"):
            self._meet()

    def set_timeout(self, seconds: float) -> None:
        """See `Group`."""
        self._timeout_s = seconds

    def close(self) -> None:
        """See `Group`."""
        self._shut("closed")

    def _check_chunks(self, op: str, x: Tensor) -> None:
        if x.dim() == 0 or x.shape[0] != self.size:
            raise ValueError(f"group {self.name}: {op} takes [{self.size}, …], got {list(x.shape)}")

    def _check_open(self) -> None:
        if self._failure is not None:
            raise CollectiveError(f"group {self.name} can't be used, member {self.index}: {self._failure}")

    def _operation(self, op: str) -> "_Operation":
        self._check_open()
        if not self.recordable and (notes := recorder()) is not None:
            notes.refuse(f"{op} of group {self.name}")
        self.calls += 1
        return self._timed(op)

    def _timed(self, op: str) -> "_Operation":
        return _Operation(self, op)

    def _ended(self, op: str, seconds: float, error: BaseException | None) -> None:
        self.seconds += seconds
        if isinstance(error, RuntimeError):
            message = f"group {self.name}, member {self.index} of {self.size}: {op} failed: {error}"
            self._shut(message)
            raise CollectiveError(message) from error

    def _shut(self, reason: str) -> None:
        with self._state:
            if self._failure is not None:
                return
            self._failure = reason
            self._release(reason)

    def _sum(self, op: str, x: Tensor) -> Tensor:
        """[*s] on every member → [*s], the bits of `sum_in_member_order`."""
        return sum_in_member_order(self._gather(op, x))

    def _sum_chunks(self, op: str, x: Tensor) -> Tensor:
        """[N, *s] → [*s], the same of everybody's chunk `index`."""
        return sum_in_member_order(self._swap(op, x))

    def _lend(self, op: str, xs: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """Of each [N, *s], N times [*s], by a `_swap` each; see `Group.all_to_all_lent`."""
        return [self._swap(op, x).unbind() for x in xs]

    @abstractmethod
    def _gather(self, op: str, x: Tensor) -> Tensor:
        """[*s] on every member → [N, *s]."""

    @abstractmethod
    def _swap(self, op: str, x: Tensor) -> Tensor:
        """[N, *s] → [N, *s]: chunk j goes to member j."""

    @abstractmethod
    def _copy(self, x: Tensor, root: int) -> Tensor:
        """[*s] → [*s] of member `root`."""

    @abstractmethod
    def _meet(self) -> None:
        """Returns when all members are here."""

    @abstractmethod
    def _release(self, reason: str) -> None:
        """Gives resources back without waiting; called once, with the state lock held."""


class _Operation:
    """Takes the time of what runs in its context, and turns a RuntimeError into the group's end. A class of its own, since
    there are hundreds of operations in a step and a generator takes three times as long to enter and leave."""

    __slots__ = ("_begun", "_group", "_op")

    def __init__(self, group: ExchangeGroup, op: str) -> None:
        self._group, self._op = group, op

    def __enter__(self) -> None:
        self._begun = perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._group._ended(self._op, perf_counter() - self._begun, error)
