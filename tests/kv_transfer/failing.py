"""What tests of failing transfers share: a source that waits to be let go on, and how a pull fails."""

import asyncio

import grpc
import pytest

from cp_wire.pb import kv_transfer_pb2 as pb
from kv_transfer.pull import TransferFailed
from kv_transfer.service import KvTransferServicer
from kv_transfer.source import Source
from tests.kv_transfer.cluster import DEADLINE_S, Sides, side

PAIR = (side(2, 1, 4), side(1, 4, 4))


class Gated(KvTransferServicer):
    """Sends `free` messages, sets `reached`, and goes on when `gate` is set."""

    def __init__(self, source: Source, free: int = 1) -> None:
        super().__init__(source, write_s=1.0)
        self.free = free
        self.reached = asyncio.Event()
        self.gate = asyncio.Event()
        self.ended = asyncio.Event()

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            await super().Fetch(request, context)
        finally:
            self.ended.set()

    async def send(self, frame: bytes, context: grpc.aio.ServicerContext) -> None:
        if self.free == 0:
            self.reached.set()
            await self.gate.wait()
        else:
            self.free -= 1
        await super().send(frame, context)


async def failure(both: Sides, *range_: int) -> TransferFailed:
    with pytest.raises(TransferFailed) as failed:
        await both.move(*range_)
    return failed.value


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await event.wait()
