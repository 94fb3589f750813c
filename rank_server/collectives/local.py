"""Collectives between N threads of one process, for tests: tensors really change hands and every deadline is real."""

import itertools
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from rank_server.collectives.base import CollectiveError, Group
from rank_server.collectives.exchange import ExchangeGroup
from rank_server.collectives.solo import SoloGroup


class _Round:
    """The k-th exchange of a group: what each member brought, under the name that its first member gave."""

    def __init__(self, size: int, opener: int, what: str) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.missing = set(range(size))
        self.readers = size
        self.opener = opener
        self.what = what


class _Room:
    """What the members of one group share."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        self._changed = threading.Condition()
        self._rounds: dict[int, _Round] = {}
        self._failure: str | None = None

    def fail(self, reason: str) -> None:
        """Every member that waits for an incomplete round, now or later, raises."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def exchange(self, number: int, index: int, what: str, x: Tensor, timeout_s: float) -> list[Tensor]:
        """Brings x to the round and returns what all members brought, in member order; RuntimeError on failure."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            turn = self._rounds.setdefault(number, _Round(len(self.ranks), index, what))
            if turn.what == what:
                turn.tensors[index] = x.clone()
                turn.missing.discard(index)
                self._changed.notify_all()
            else:
                # The member stays missing: a round with a mismatch never completes, for anybody.
                self.fail(f"member {index} calls {what} where member {turn.opener} calls {turn.what}")
            while turn.missing:
                if self._failure is not None:
                    turn.missing.add(index)  # for those who come later: who gave up is not here
                    raise RuntimeError(self._failure)
                if not self._changed.wait(deadline - time.monotonic()):
                    self.fail(f"members {sorted(turn.missing)} did not call {what} within {timeout_s:g} s")
            turn.readers -= 1
            if turn.readers == 0:
                del self._rounds[number]
            return [turn.tensors[member] for member in range(len(self.ranks))]


class LocalHub:
    """Where the members of one process meet; give the same hub to every member's `LocalBackend`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rooms: dict[bytes, _Room] = {}
        self._numbers = itertools.count()

    def new_room(self, name: str, ranks: Sequence[int]) -> bytes:
        """Makes a meeting place for a group and returns its key."""
        with self._lock:
            key = f"{name}#{next(self._numbers)}".encode()
            self._rooms[key] = _Room(name, tuple(ranks))
            return key

    def room(self, key: bytes) -> _Room | None:
        """The meeting place with this key."""
        with self._lock:
            return self._rooms.get(key)


class LocalGroup(ExchangeGroup):
    """One member's end of a room."""

    def __init__(self, room: _Room, index: int, timeout_s: float) -> None:
        super().__init__(room.name, len(room.ranks), index, timeout_s)
        self._room = room
        self._rounds_seen = 0

    def _exchange(self, what: str, x: Tensor) -> list[Tensor]:
        self._rounds_seen += 1
        return self._room.exchange(self._rounds_seen, self.index, what, x, self._timeout_s)

    def _gather(self, op: str, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(_signature(op, x), x))

    def _swap(self, op: str, x: Tensor) -> Tensor:
        return torch.stack([brought[self.index] for brought in self._exchange(_signature(op, x), x)])

    def _copy(self, x: Tensor, root: int) -> Tensor:
        return self._exchange(_signature(f"broadcast from {root}", x), x)[root].clone()

    def _meet(self) -> None:
        self._exchange("barrier", torch.empty(0, device="cpu"))

    def _release(self, reason: str) -> None:
        self._room.fail(f"member {self.index} left: {reason}")


class LocalBackend:
    """`Backend` of one member."""

    def __init__(self, hub: LocalHub) -> None:
        self._hub = hub

    def prepare(self, name: str, ranks: Sequence[int]) -> bytes:
        """See `Backend`."""
        return self._hub.new_room(name, ranks)

    def open(self, name: str, ranks: Sequence[int], rank: int, bootstrap: bytes, timeout_s: float) -> Group:
        """See `Backend`."""
        if len(ranks) == 1:
            return SoloGroup(name)
        room = self._hub.room(bootstrap)
        if room is None or room.ranks != tuple(ranks) or room.name != name:
            raise CollectiveError(f"group {name} of ranks {list(ranks)} was not prepared under {bootstrap!r}")
        group = LocalGroup(room, room.ranks.index(rank), timeout_s)
        group.barrier()
        group.calls = 0
        return group


def _signature(op: str, x: Tensor) -> str:
    return f"{op} of {x.dtype} {list(x.shape)}"
