"""Fake ranks that die or freeze are restarted, as often as they may be; without its coordinator the cluster ends."""

import asyncio
import os
import signal
import sys

import pytest

from cp_client import AsyncClient, child
from cp_client.child import Child, child_environment
from cp_client.launcher import Cluster, ClusterFailed
from tests.cp_client.fake_programs import spec
from tests.cp_client.launched import DEADLINE_S, started
from tests.machine import alive, free_port

pytestmark = pytest.mark.cluster
REGISTER_S = 6.0
"""Enough for the start of a fake rank."""


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
        with pytest.raises(ClusterFailed, match="rank 0 died again after 1 restart: exited with status 1"):
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
