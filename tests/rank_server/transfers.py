"""Transfers between whole ranks that are stopped at a known point, and what the tests of them share."""

import asyncio
from contextlib import asynccontextmanager
from unittest import mock

import grpc
import pytest

from cp_wire import errors
from kv_transfer.service import KvTransferServicer
from rank_server.pool_store import HostStore
from tests.inproc import Shape
from tests.pd import pair
from tests.wired import DEADLINE_S

PROMPT = list(range(30, 61))
SHAPE = Shape(block_size=4, interleave=4)


class Gated(KvTransferServicer):
    """Sends one message, then waits to be told."""

    def __init__(self, source):
        super().__init__(source)
        self.sent = 0
        self.waits = asyncio.Event()
        self.go = asyncio.Event()

    async def send(self, frame, context):
        if self.sent:
            self.waits.set()
            await self.go.wait()
        self.sent += 1
        await super().send(frame, context)


@asynccontextmanager
async def leased(tiny, **options):
    """A request that is prefilled and leased."""
    async with pair(tiny(), SHAPE, SHAPE, **options) as running:
        moved, handle = await running.begin(PROMPT, room=2)
        await running.lease(moved)
        yield running, moved, handle


@asynccontextmanager
async def halfway(tiny):
    """A pull of which one message has arrived and the rest is held back by the source."""
    async with leased(tiny, servicer=Gated) as (running, moved, _):
        arrived, write, gate = asyncio.Event(), HostStore.write, running.source.servicers[0]

        def told(*args):
            write(*args)
            arrived.set()

        with mock.patch.object(HostStore, "write", told):
            call = running.target.stubs[0].Pull(running.pull_of(moved, 0, 0, len(PROMPT)), timeout=DEADLINE_S)
            await asyncio.wait_for(asyncio.gather(gate.waits.wait(), arrived.wait()), DEADLINE_S)
            yield running, moved, call, gate


async def refusal(call):
    """The error that a call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return errors.from_rpc_error(caught.value)
