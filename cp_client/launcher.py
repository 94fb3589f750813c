"""A whole cluster as children of this process: start, watch, restart, stop."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cp_client.child import Child, child_environment
from cp_client.draining import tell_of_requests
from cp_client.loading import follow_loading
from cp_wire.channels import open_channel
from cp_wire.errors import RpcError, from_rpc_error
from cp_wire.host import local_address
from cp_wire.logs import get_logger
from cp_wire.pb import coordinator_pb2, coordinator_pb2_grpc
from cp_wire.words import counted

log = get_logger("launcher")

WATCH_TIMEOUT_S = 3600.0
WATCH_RETRY_S = 0.5
STATUS_TIMEOUT_S = 5.0
REGISTER_S = 60.0
MAX_BACKOFF_S = 10.0


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What to start. `rank` gets `--rank R --coordinator HOST:PORT` appended."""

    coordinator: tuple[str, ...]
    rank: tuple[str, ...]
    num_ranks: int
    threads_per_rank: int = 1
    max_restarts: int = 5
    """Restarts of one rank in a row, none of which got through `register_s`, before the cluster is given up."""
    backoff_s: float = 0.2
    """Pause before the first restart; doubles each time."""
    listen_timeout_s: float = 120.0
    """How long the coordinator may take until it listens."""
    register_s: float = REGISTER_S
    """How long a rank may take from its start until the coordinator knows it; one that lives longer has settled."""
    blame_s: float = 2.0
    """After a child has gone without a word during start: how long to wait for what the coordinator says."""
    drain_s: float = 10.0
    """How long the coordinator may take to stop."""
    stop_s: float = 5.0
    """How long the ranks may take after that."""


class ClusterFailed(Exception):
    """The cluster did not start, or cannot go on; `status` is the exit status to report."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Cluster:
    """The processes of one cluster on this host. Call `stop` whatever happens."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._coordinator: Child | None = None
        self._ranks: dict[int, Child] = {}
        self._address = ""
        self._gone: list[Child] = []
        """Children in the order of their end."""
        self._killed: set[int] = set()
        """Pids of fenced ranks that were sent SIGKILL."""

    async def start(self) -> str:
        """Starts everything and returns HOST:PORT once requests are accepted; `ClusterFailed` names the process at fault."""
        self._coordinator = self._track(Child("coordinator", self._spec.coordinator, child_environment(1)))
        self._address = local_address(await self._announced("listening", self._spec.listen_timeout_s))
        for rank in range(self._spec.num_ranks):
            self._start_rank(rank)
        following: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._expect(child)) for child in self._ranks.values()]
        following.append(asyncio.ensure_future(follow_loading(self._address)))
        try:
            # The coordinator bounds the rest of the start itself.
            return await self._announced("ready", None)
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    async def supervise(self) -> None:
        """Restarts ranks and kills fenced ones until that is no longer possible: ends with `ClusterFailed`."""
        assert self._coordinator is not None
        tasks: list[asyncio.Future[None]] = [asyncio.ensure_future(self._keep(rank)) for rank in self._ranks]
        tasks.append(asyncio.ensure_future(self._kill_fenced()))
        try:
            ends: list[asyncio.Future[Any]] = [self._coordinator.exited, *tasks]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not self._coordinator.alive:
                # A grandchild may hold its output, and a rank have found it dead before its last words are read.
                await self._coordinator.wait()
                raise ClusterFailed(f"the coordinator has gone: {self._coordinator.why()}", 1)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def tell_of_requests(self) -> None:
        """Says on stderr how many requests `stop` will wait for."""
        if self._address:
            await tell_of_requests(self._address)

    async def stop(self) -> None:
        """Stops the coordinator, which drains, then the ranks; leaves no process."""
        if self._coordinator is not None:
            await self._coordinator.stop(self._spec.drain_s)
        await asyncio.gather(*(child.stop(self._spec.stop_s) for child in self._ranks.values()))
        said = {child.fatal for child in self._gone if child.told}
        for child in self._gone:
            if child.fatal not in said:
                said.add(child.fatal)
                child.tell()

    def kill(self) -> None:
        """SIGKILL to all, without waiting."""
        for child in (self._coordinator, *self._ranks.values()):
            if child is not None:
                child.send(signal.SIGKILL)

    def _start_rank(self, rank: int) -> None:
        argv = (*self._spec.rank, "--rank", str(rank), "--coordinator", self._address)
        self._ranks[rank] = self._track(Child(f"rank {rank}", argv, child_environment(self._spec.threads_per_rank)))

    def _track(self, child: Child) -> Child:
        child.exited.add_done_callback(lambda _: self._gone.append(child))
        return child

    async def _announced(self, word: str, timeout: float | None) -> str:
        """The address after `word` on the coordinator's stdout, unless a child ends first."""
        assert self._coordinator is not None
        announced = self._coordinator.announced[word]
        exits = [child.exited for child in (self._coordinator, *self._ranks.values())]
        events: list[asyncio.Future[Any]] = [announced, *exits]
        await asyncio.wait(events, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if announced.done():
            return announced.result()
        if not any(done.done() for done in exits):
            raise ClusterFailed(f"the coordinator failed to start: it was not {word} within {timeout:g} s", 1)
        if not any(child.fatal for child in self._gone):
            # A rank that goes without a word may have been dragged along: the coordinator may know why.
            await asyncio.wait([self._coordinator.exited], timeout=self._spec.blame_s)
        failed = [child for child in self._gone if child.exited.result() != 0] or self._gone
        culprit = next((child for child in failed if child.fatal), failed[0])
        status = 2 if culprit.exited.result() == 2 else 1
        raise ClusterFailed(f"{culprit.name} failed to start: {culprit.why()}", status)

    async def _keep(self, rank: int) -> None:
        """Restarts one rank as often as the spec allows, anew each time it has settled."""
        assert self._coordinator is not None
        attempt = 0
        while True:
            child = self._ranks[rank]
            settled = await self._expect(child)
            await child.wait()
            child.close_stdin()
            attempt = 0 if settled else attempt
            if attempt == self._spec.max_restarts:
                raise ClusterFailed(f"{child.name} died again after {counted(attempt, 'restart')}: {child.why()}", 1)
            pause = min(MAX_BACKOFF_S, self._spec.backoff_s * 2**attempt)
            attempt += 1
            log.warning("rank died, will restart", rank=rank, why=child.why(), attempt=attempt, pause_s=pause)
            await asyncio.sleep(pause)
            if not self._coordinator.alive:
                return
            self._start_rank(rank)

    async def _expect(self, child: Child) -> bool:
        """Kills a rank that the coordinator does not know in time: until then nobody else sees that it is frozen.

        Returns whether it is known and has lived so long.
        """
        await asyncio.wait([child.exited], timeout=self._spec.register_s)
        if not child.alive:
            return False
        async with open_channel(self._address, "prompt") as channel:
            control = coordinator_pb2_grpc.ControlServiceStub(channel)
            while child.alive:
                try:
                    status = await control.GetStatus(coordinator_pb2.GetStatusRequest(), timeout=STATUS_TIMEOUT_S)
                except RpcError as error:
                    # A coordinator that does not answer is no proof against the rank.
                    log.debug("no status", why=from_rpc_error(error).message)
                    await asyncio.sleep(WATCH_RETRY_S)
                    continue
                if child.pid in (entry.pid for entry in status.ranks):
                    return True
                child.condemn(f"it did not register within {self._spec.register_s:g} s")
                return False
        return False

    async def _kill_fenced(self) -> None:
        """Kills ranks that the coordinator has given up: a frozen one holds sockets that its peers wait for."""
        async with open_channel(self._address, "prompt") as channel:
            control = coordinator_pb2_grpc.ControlServiceStub(channel)
            while True:
                try:
                    async for update in control.WatchStatus(coordinator_pb2.WatchStatusRequest(), timeout=WATCH_TIMEOUT_S):
                        self._kill_lost(update.status)
                except RpcError as error:
                    log.debug("watch ended", why=from_rpc_error(error).message)
                await asyncio.sleep(WATCH_RETRY_S)

    def _kill_lost(self, status: coordinator_pb2.GetStatusResponse) -> None:
        for entry in status.ranks:
            child = self._ranks.get(entry.rank)
            # The pid tells a fenced process from the one that has taken its place.
            if child is None or not child.alive or child.pid != entry.pid:
                continue
            if entry.state == "lost" and entry.pid not in self._killed:
                self._killed.add(entry.pid)
                log.warning("killing a fenced rank", rank=entry.rank, pid=entry.pid, why=entry.fenced_reason)
                child.send(signal.SIGKILL)


async def run_cluster(cluster: Cluster, on_ready: Callable[[str], None]) -> None:
    """Starts, calls `on_ready` with HOST:PORT, supervises; always stops everything. `ClusterFailed` when it fails."""
    try:
        on_ready(await cluster.start())
        await cluster.supervise()
    except asyncio.CancelledError:
        await cluster.tell_of_requests()
        raise
    finally:
        await cluster.stop()
