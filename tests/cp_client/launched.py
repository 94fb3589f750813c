"""Clusters of fake processes under a launcher in this process."""

import asyncio
import os
from contextlib import asynccontextmanager, suppress

import pytest

from cp_client.launcher import Cluster, ClusterFailed, run_cluster
from cp_wire.channels import open_channel
from cp_wire.pb import coordinator_pb2 as pb
from cp_wire.pb import coordinator_pb2_grpc as rpc
from tests.cp_client.fake_programs import spec
from tests.machine import children_of, free_port

DEADLINE_S = 20


class Running:
    """A started cluster under supervision."""

    def __init__(self, cluster, address):
        self.cluster, self.address = cluster, address
        self.supervision = asyncio.ensure_future(cluster.supervise())

    async def status_with(self, wanted):
        """The first status for which `wanted` holds."""
        async with asyncio.timeout(DEADLINE_S), open_channel(self.address, "control") as channel:
            watch = rpc.ControlServiceStub(channel).WatchStatus(pb.WatchStatusRequest(), timeout=DEADLINE_S)
            async for update in watch:
                if wanted(update.status):
                    return update.status
        raise AssertionError("the watch ended")

    async def pids(self):
        status = await self.status_with(lambda status: True)
        return {rank.rank: rank.pid for rank in status.ranks}


@asynccontextmanager
async def started(*words, coordinator=(), **limits):
    """A cluster of two ranks. words: for the ranks; coordinator: for the coordinator; limits: of the ClusterSpec."""
    port = free_port()
    cluster = Cluster(spec(2, ("--port", str(port), *coordinator), words, **limits))
    running = None
    try:
        async with asyncio.timeout(DEADLINE_S):
            running = Running(cluster, await cluster.start())
        yield running
    finally:
        if running is not None:
            running.supervision.cancel()
            with suppress(asyncio.CancelledError, ClusterFailed):
                await running.supervision
        async with asyncio.timeout(DEADLINE_S):
            await cluster.stop()


async def start_failure(**kwargs):
    """(message, exit status) of a cluster that does not start; no process of it may be left."""
    before = children_of(os.getpid())
    cluster = Cluster(spec(**kwargs))
    with pytest.raises(ClusterFailed) as caught:
        async with asyncio.timeout(DEADLINE_S):
            await run_cluster(cluster, lambda address: pytest.fail("it says it is ready"))
    assert children_of(os.getpid()) == before
    return str(caught.value), caught.value.status
