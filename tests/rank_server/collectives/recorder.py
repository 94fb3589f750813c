"""A stand-in for cupy's NCCL module: communicators of one process that move real bytes between their members' tensors.

As in NCCL, a call only puts an operation into the member's stream; it happens when all members have put it there, and what is
grouped happens as one. Each member's operations are written down in order. Unlike NCCL, members whose operations differ get an
error at once, and a member that aborts is noticed by all others.
"""

import ctypes
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

STREAM = 7
NEVER_S = 30.0
"""Longest wait for members that don't come: as good as for ever, but no thread outlives a test run."""


@dataclass(frozen=True)
class Operation:
    """One operation of one member: what all members must agree on, and where its bytes lie."""

    what: tuple[object, ...]
    sources: tuple[int, ...]
    """Address of the bytes for all (all-gather, broadcast), or for each member (send)."""
    targets: tuple[int, ...]
    """Address for the bytes of all, or of each member."""
    width: int
    """Bytes that go from one member to another."""


@dataclass
class Room:
    """What the members of one communicator share."""

    size: int
    joined: set[int] = field(default_factory=set)
    streams: dict[int, list[Operation]] = field(default_factory=dict)
    """What each member has put into its stream, in order."""
    done: int = 0
    """Operations that have happened."""
    failure: str | None = None


class RecorderError(RuntimeError):
    """As `NcclError`."""


class Recorder:
    """The module. One object serves all members, each with a thread of its own."""

    NCCL_UINT8 = 1
    available = True

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.rooms: dict[tuple[int, ...], Room] = {}
        self._numbers = itertools.count(1)
        self._grouped = threading.local()
        self.used = threading.local()
        """The communicator that the calling thread used last."""

    def get_unique_id(self) -> tuple[int, ...]:
        number = next(self._numbers)
        # Signed, as cupy gives them.
        return (number % 100, -1, -128, 127, *[0] * 124)

    def groupStart(self) -> None:
        assert getattr(self._grouped, "calls", None) is None, "a group in a group"
        self._grouped.calls = []

    def groupEnd(self) -> None:
        calls, self._grouped.calls = self._grouped.calls, None
        sends = {peer: (address, width) for kind, peer, address, width, _ in calls if kind == "send"}
        receives = {peer: (address, width) for kind, peer, address, width, _ in calls if kind == "recv"}
        (communicator,) = {each[-1] for each in calls}
        peers = range(communicator.room.size)
        assert sorted(sends) == sorted(receives) == list(peers) and len(calls) == 2 * len(peers)
        (width,) = {width for _, width in (*sends.values(), *receives.values())}
        communicator.put(
            Operation(
                ("sends and receives", width),
                tuple(sends[peer][0] for peer in peers),
                tuple(receives[peer][0] for peer in peers),
                width,
            )
        )

    def grouped(self, kind: str, peer: int, address: int, width: int, communicator: "Communicator") -> None:
        assert getattr(self._grouped, "calls", None) is not None, f"a {kind} outside a group can wait for ever"
        self._grouped.calls.append((kind, peer, address, width, communicator))

    def NcclCommunicator(self, size: int, unique_id: tuple[int, ...], index: int) -> "Communicator":
        """Waits for all members."""
        assert len(unique_id) == 128 and all(-128 <= number < 128 for number in unique_id)
        with self.changed:
            room = self.rooms.setdefault(unique_id, Room(size))
            assert room.size == size and index not in room.joined
            room.joined.add(index)
            room.streams[index] = []
            self.changed.notify_all()
            if not self.changed.wait_for(lambda: len(room.joined) == size, NEVER_S):
                raise RecorderError("nobody came")
        return Communicator(self, room, index)


class Communicator:
    """One member's end."""

    def __init__(self, module: Recorder, room: Room, index: int) -> None:
        self._module, self.room, self.index = module, room, index
        self._aborted = False

    def allGather(self, source: int, target: int, count: int, datatype: int, stream: int) -> None:
        assert stream == STREAM
        self.put(Operation(("all-gather", count, datatype), (source,), (target,), count))

    def broadcast(self, source: int, target: int, count: int, datatype: int, root: int, stream: int) -> None:
        assert stream == STREAM
        self.put(Operation(("broadcast", count, datatype, root), (source,), (target,), count))

    def send(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._module.grouped("send", peer, address, count, self)

    def recv(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._module.grouped("recv", peer, address, count, self)

    def check_async_error(self) -> None:
        with self._module.changed:
            assert not self._aborted, "asked after its abort"
            if self.room.failure is not None:
                raise RecorderError(self.room.failure)

    def abort(self) -> None:
        with self._module.changed:
            self._aborted = True
            self.room.failure = self.room.failure or f"remote member {self.index} has gone"
            self._module.changed.notify_all()

    def idle(self) -> bool:
        """Whether nothing of this member waits for others; what is aborted waits no more."""
        with self._module.changed:
            return self._aborted or self.room.done == len(self.room.streams[self.index])

    def put(self, operation: Operation) -> None:
        room = self.room
        self._module.used.communicator = self
        with self._module.changed:
            assert not self._aborted, "used after its abort"
            stream = room.streams[self.index]
            number = len(stream)
            stream.append(operation)
            here = [other[number] for other in room.streams.values() if len(other) > number]
            if len({each.what for each in here}) > 1:
                room.failure = f"operation {number} differs: {sorted({str(each.what) for each in here})}"
            if room.failure is None and len(here) == room.size:
                self._move([room.streams[member][number] for member in range(room.size)])
                room.done += 1

    def _move(self, operations: list[Operation]) -> None:
        kind, *_ = operations[0].what
        root = operations[0].what[-1] if kind == "broadcast" else None
        # All reading comes before all writing: a broadcast's source is its target.
        read = [[ctypes.string_at(address, each.width) for address in each.sources] for each in operations]
        for member, each in enumerate(operations):
            if kind == "broadcast":
                assert isinstance(root, int)
                ctypes.memmove(each.targets[0], read[root][0], each.width)
                continue
            for other in range(self.room.size):
                target = each.targets[0] + other * each.width if kind == "all-gather" else each.targets[other]
                ctypes.memmove(target, read[other][0 if kind == "all-gather" else member], each.width)


class HostQueue:
    """`Queue` of a member's thread, over all of its communicators."""

    device = torch.device("cpu")

    def __init__(self, module: Recorder) -> None:
        self._module = module

    def aside(self, name: str, job: Callable[[], None]) -> None:
        thread = threading.Thread(target=job, name=name, daemon=True)
        thread.start()
        if name.startswith("abort"):
            # A tensor of the host must not be given back while others may still write into it.
            thread.join()

    def stream(self) -> int:
        return STREAM

    def mark(self) -> Callable[[], bool]:
        return self._module.used.communicator.idle
