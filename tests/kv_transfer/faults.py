"""Faults of messages, and a source that makes them; also one in a process of its own (`install`)."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import grpc

from cp_wire.pb import kv_transfer_pb2 as pb
from kv_transfer import framing
from kv_transfer.service import KvTransferServicer, Readable
from tests.kv_transfer.cluster import encode

FILE = "KVLOOM_TEST_FAULTS"
"""Environment variable: where a process with `install` notes its faults, a line each."""
SHARE = 0.3
"""Of the messages."""


def flip(frame: bytes, rng: random.Random) -> list[bytes]:
    """One bit, anywhere: tags, lengths, header, checksum or payload."""
    damaged = bytearray(frame)
    damaged[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return [bytes(damaged)]


def drop(frame: bytes, rng: random.Random) -> list[bytes]:
    return []


def duplicate(frame: bytes, rng: random.Random) -> list[bytes]:
    return [frame] * rng.randint(2, 4)


def truncate(frame: bytes, rng: random.Random) -> list[bytes]:
    return [frame[: rng.randrange(len(frame))]]


def wrong_index(frame: bytes, rng: random.Random) -> list[bytes]:
    """A well-formed frame under another message's number, its checksum that of the true one."""
    whole = pb.FetchResponse.FromString(frame)
    whole.header.message = rng.choice([whole.header.message + 1, 0, 7, 2**32 - 1])
    return [whole.SerializeToString()]


def lying_index(frame: bytes, rng: random.Random) -> list[bytes]:
    """The same with a checksum that fits: the rows give it away."""
    taken = framing.decode(frame)
    header = taken.header
    lie = framing.Header(header.stream, header.message + 1, header.first_row, header.num_rows)
    return [encode(lie, bytes(taken.payload))]


def stale(frame: bytes, rng: random.Random) -> list[bytes]:
    """Intact, but of another session, attempt, epoch, generation, rank or range; the true one is lost."""
    taken = framing.decode(frame)
    stream = taken.header.stream._asdict()
    stream[rng.choice(list(stream))] += 1
    header = taken.header._replace(stream=framing.Stream(**stream))
    return [encode(header, bytes(taken.payload))]


KINDS: list[Callable[[bytes, random.Random], list[bytes]]] = [
    flip,
    drop,
    duplicate,
    truncate,
    wrong_index,
    lying_index,
    stale,
]


class Faulty(KvTransferServicer):
    """Spoils messages until `budget` is used up, and keeps some back to send them later, out of order."""

    def __init__(self, source: Readable, rng: random.Random, budget: list[int], done: dict[str, int]) -> None:
        super().__init__(source)
        self._rng = rng
        self._budget = budget
        self._done = done
        self._kept: list[bytes] = []

    async def send(self, frame: bytes, context: grpc.aio.ServicerContext) -> None:
        out = [frame]
        if self._budget[0] > 0 and self._rng.random() < SHARE:
            self._budget[0] -= 1
            kind = self._rng.choice([*KINDS, None])
            self._done[kind.__name__ if kind else "reorder"] = self._done.get(kind.__name__ if kind else "reorder", 0) + 1
            if kind is None:
                self._kept.append(frame)
                return
            out = kind(frame, self._rng)
        for each in out:
            await super().send(each, context)
        if self._kept and self._rng.random() < 0.5:
            await super().send(self._kept.pop(), context)


class FaultyProcess(Faulty):
    """The source of a real rank: offers no memory to ranks of its host, spoils messages without end and notes each fault."""

    def __init__(self, source: Readable) -> None:
        super().__init__(source, random.Random(1), [1 << 30], {})
        self._file = Path(os.environ[FILE])

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
        answer = await super().Describe(request, context)
        answer.ClearField("pool")
        return answer

    async def send(self, frame: bytes, context: grpc.aio.ServicerContext) -> None:
        before = dict(self._done)
        await super().send(frame, context)
        with self._file.open("a") as file:
            file.writelines(f"{kind}\n" for kind, times in self._done.items() if times > before.get(kind, 0))
