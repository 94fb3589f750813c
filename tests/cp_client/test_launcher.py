"""The launcher over fake processes: start, blame, restart, fence, stop; nothing may be left."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest

from cp_client import AsyncClient, child, loading
from cp_client.child import Child, child_environment
from cp_client.launcher import Cluster, ClusterFailed, run_cluster
from cp_wire.channels import open_channel
from cp_wire.pb import coordinator_pb2 as pb
from cp_wire.pb import coordinator_pb2_grpc as rpc
from tests.cp_client.fake_programs import COMMAND, spec

pytestmark = pytest.mark.cluster
DEADLINE_S = 20
REGISTER_S = 6.0
"""Enough for the start of a fake rank."""


def alive(pid):
    """False also for a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return [int(word) for word in children.read().split()]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
    """(message, exit status, pids) of a cluster that does not start."""
    before = children_of(os.getpid())
    cluster = Cluster(spec(**kwargs))
    with pytest.raises(ClusterFailed) as caught:
        async with asyncio.timeout(DEADLINE_S):
            await run_cluster(cluster, lambda address: pytest.fail("it says it is ready"))
    assert children_of(os.getpid()) == before
    return str(caught.value), caught.value.status


async def test_children_stay_in_the_session_and_know_their_threads(capfd):
    async with started(threads_per_rank=3) as running:
        pids = await running.pids()
        for pid in pids.values():
            assert os.getsid(pid) == os.getsid(0)
            assert os.getpgid(pid) != os.getpgid(0)
    assert not any(map(alive, pids.values()))
    err = capfd.readouterr().err
    assert "[rank 0] rank 0 threads 3\n" in err
    assert "[coordinator] a line that means nothing\n" in err


async def test_k9_a_rank_that_fails_at_start_is_named_with_its_reason():
    message, status = await start_failure(rank=("--fail", "1", "--message", "weights.safetensors is cut off"))
    assert message == "rank 1 failed to start: weights.safetensors is cut off"
    assert status == 1


async def test_k9_the_sentence_of_a_failed_start_is_left_to_who_reports_it(capfd, tmp_path):
    """The other rank's own end is printed: nobody else says it."""
    os.mkfifo(tmp_path / "fifo")
    words = ("--fail", "0", "--message", "no room", "--also", "1", "--fifo", str(tmp_path / "fifo"))
    message, _ = await start_failure(rank=words, coordinator=("--ranks", "9"))
    assert message == "rank 0 failed to start: no room"
    err = capfd.readouterr().err
    assert "no room" not in err
    assert err.count("[rank 1] fatal: too cold\n") == 1


async def test_how_far_the_ranks_are_is_shown_during_the_start(monkeypatch):
    seen = []
    both = asyncio.Event()

    def show(fractions):
        seen.append(dict(fractions))
        if fractions == {0: 0.5, 1: 0.5}:
            both.set()

    @contextmanager
    def recording(console):
        yield show

    monkeypatch.setattr(loading, "display", recording)
    monkeypatch.setattr(loading, "POLL_S", 0.01)
    cluster = Cluster(spec(2, ("--port", str(free_port()), "--ranks", "3", "--loaded", "0.5")))
    start = asyncio.ensure_future(cluster.start())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await both.wait()
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        count = len(seen)
    finally:
        await cluster.stop()
    assert len(seen) == count


async def test_k9_a_rank_that_refuses():
    message, status = await start_failure(rank=("--fail", "0", "--message", "no", "--status", "2"))
    assert (message, status) == ("rank 0 failed to start: no", 2)


async def test_k9_a_rank_that_goes_without_a_word():
    message, status = await start_failure(rank=("--die-always", "1"), ranks=3, blame_s=0.5, coordinator=("--ranks", "9"))
    assert (message, status) == ("rank 1 failed to start: exited with status 3", 1)


@pytest.mark.parametrize("status", [1, 2])
async def test_k9_a_coordinator_that_does_not_start(status):
    words = ("--refuse", "dcp 3 does not fit", "--status", str(status))
    assert await start_failure(coordinator=words) == ("coordinator failed to start: dcp 3 does not fit", status)


async def test_k9_a_port_in_use():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        message, status = await start_failure(coordinator=("--port", str(port)))
    assert message == f"coordinator failed to start: cannot listen on 127.0.0.1:{port}: address already in use"
    assert status == 1


async def test_k9_a_coordinator_that_never_listens():
    message, status = await start_failure(coordinator=("--silent",), listen_timeout_s=0.5)
    assert (message, status) == ("the coordinator failed to start: it was not listening within 0.5 s", 1)


async def test_k8_a_dead_rank_is_restarted():
    async with started() as running:
        before = await running.pids()
        os.kill(before[1], signal.SIGKILL)
        after = await running.status_with(lambda status: len(status.ranks) == 2 and status.ranks[1].pid != before[1])
        assert after.ranks[0].pid == before[0]
    assert not any(alive(rank.pid) for rank in after.ranks)


async def test_k8_a_frozen_rank_is_killed_when_it_is_fenced():
    async with started(coordinator=("--fence", "0")) as running:
        before = await running.pids()
        os.kill(before[0], signal.SIGSTOP)
        async with AsyncClient(running.address) as client:
            await client.drain(1)
        after = await running.status_with(lambda status: status.ranks[0].pid != before[0])
        assert not alive(before[0])
        assert after.ranks[1].pid == before[1]


async def test_k8_a_rank_that_freezes_before_it_registers_is_replaced(tmp_path):
    freeze = tmp_path / "freeze"
    async with started("--freeze", str(freeze), register_s=REGISTER_S) as running:
        before = await running.pids()
        freeze.write_text("1")
        os.kill(before[1], signal.SIGKILL)
        after = await running.status_with(lambda status: status.ranks[1].pid != before[1])
        assert not freeze.exists()
        assert after.ranks[0].pid == before[0]
        assert running.supervision.done() is False


async def test_k9_a_rank_that_freezes_before_it_registers_is_named(tmp_path):
    freeze = tmp_path / "freeze"
    freeze.write_text("0")
    message, status = await start_failure(ranks=1, rank=("--freeze", str(freeze)), register_s=0.2)
    assert (message, status) == ("rank 0 failed to start: it did not register within 0.2 s", 1)


async def test_a_coordinator_that_does_not_answer_is_no_proof_against_a_rank():
    cluster = Cluster(spec(1, register_s=0.0))
    cluster._address = f"127.0.0.1:{free_port()}"
    child = Child("rank 0", (sys.executable, "-c", "input()"), child_environment(1))
    try:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(cluster._expect(child), 0.3)
        assert child.alive
    finally:
        await child.stop(0.0)


async def test_m4_a_rank_that_keeps_dying_ends_the_cluster(tmp_path):
    async with started("--die-always", "1", "--spare", str(tmp_path / "spared"), max_restarts=2) as running:
        os.kill((await running.pids())[1], signal.SIGKILL)
        with pytest.raises(ClusterFailed, match="rank 1 died again after 2 restarts: exited with status 3"):
            await asyncio.wait_for(running.supervision, DEADLINE_S)


async def test_a_rank_that_had_settled_has_all_restarts_again(monkeypatch):
    cluster = Cluster(spec(1, backoff_s=0.0, max_restarts=1))
    cluster._coordinator = Child("coordinator", ("sleep", "60"), child_environment(1))
    settled, started = iter([False, True, True, False]), []

    async def expect(child):
        return next(settled)

    def start(rank):
        started.append(rank)
        cluster._ranks[rank] = Child("rank 0", ("false",), child_environment(1))

    monkeypatch.setattr(cluster, "_expect", expect)
    monkeypatch.setattr(cluster, "_start_rank", start)
    start(0)
    try:
        with pytest.raises(ClusterFailed, match="rank 0 died again after 1 restarts: exited with status 1"):
            await asyncio.wait_for(cluster._keep(0), DEADLINE_S)
    finally:
        await cluster.stop()
    assert len(started) == 4


async def test_a_rank_that_is_known_has_settled():
    async with started(register_s=REGISTER_S) as running:
        child = running.cluster._ranks[0]
        assert await running.cluster._expect(child)
        child.send(signal.SIGKILL)
        await child.wait()
        assert not await running.cluster._expect(child)


async def test_the_end_of_the_coordinator_ends_the_cluster():
    async with started() as running:
        pids = await running.pids()
        running.cluster._coordinator.send(signal.SIGKILL)
        with pytest.raises(ClusterFailed, match="the coordinator has gone: killed by SIGKILL"):
            await asyncio.wait_for(running.supervision, DEADLINE_S)
    assert not any(map(alive, pids.values()))


async def test_the_end_of_the_coordinator_is_a_failure_also_when_a_rank_sees_it_first(monkeypatch):
    """Its output is held open by a process that it has started, until a rank has gone and has not been restarted."""
    monkeypatch.setattr(child, "OUTPUT_GRACE_S", DEADLINE_S)
    cluster = Cluster(spec(1, backoff_s=0.0))
    cluster._address = f"127.0.0.1:{free_port()}"
    coordinator = Child("coordinator", ("sh", "-c", "sleep 60 & exit 3"), child_environment(1))
    keep = cluster._keep

    async def keep_then_let_go(rank):
        await keep(rank)
        os.killpg(coordinator.pid, signal.SIGKILL)

    monkeypatch.setattr(cluster, "_keep", keep_then_let_go)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.shield(coordinator._died)
        cluster._coordinator = coordinator
        cluster._ranks[0] = Child("rank 0", ("true",), child_environment(1))
        with pytest.raises(ClusterFailed, match="the coordinator has gone: exited with status 3"):
            await cluster.supervise()
        await cluster.stop()


class Launcher:
    """A launcher process with its three children."""

    def __init__(self, *words):
        self.process = subprocess.Popen(
            [*COMMAND, "launcher", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        line = self.process.stdout.readline()
        assert line.startswith("ready grpc="), line + self.process.stderr.read()
        self.children = children_of(self.process.pid)
        assert len(self.children) == 3

    def finish(self):
        self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_m2_a_signal_stops_everything(number):
    launcher = Launcher()
    launcher.process.send_signal(number)
    assert launcher.finish() == 0
    assert not any(map(alive, launcher.children))


def test_m2_a_stop_says_what_it_waits_for():
    launcher = Launcher("--running", "2")
    launcher.process.terminate()
    _, err = launcher.process.communicate(timeout=DEADLINE_S)
    assert "kvloom: draining 2 requests, Ctrl-C again to force the end\n" in err


def test_m2_a_frozen_rank_does_not_survive_the_stop():
    launcher = Launcher()
    os.kill(launcher.children[-1], signal.SIGSTOP)
    launcher.process.terminate()
    assert launcher.finish() == 0
    assert not any(map(alive, launcher.children))


def test_m5_a_second_signal_kills_what_is_deaf():
    launcher = Launcher("--stubborn")
    launcher.process.terminate()
    while "deaf" not in launcher.process.stderr.readline():
        assert launcher.process.poll() is None
    launcher.process.terminate()
    assert launcher.finish() == 1
    for pid in launcher.children:
        wait_gone(pid)


def test_m1_children_notice_that_the_launcher_was_killed():
    launcher = Launcher()
    launcher.process.kill()
    launcher.finish()
    for pid in launcher.children:
        wait_gone(pid)


def wait_gone(pid):
    """Blocks until a process that is nobody's child of ours has ended."""
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            assert select.select([fd], [], [], DEADLINE_S)[0], f"process {pid} is still there"
        finally:
            os.close(fd)
