"""The start of a launcher's fake processes: what they are given, who is blamed when it fails, and nothing is left."""

import asyncio
import os
import socket
from contextlib import contextmanager

import pytest

from cp_client import loading
from cp_client.launcher import Cluster
from tests.cp_client.fake_programs import spec
from tests.cp_client.launched import DEADLINE_S, start_failure, started
from tests.machine import alive, free_port

pytestmark = pytest.mark.cluster


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


async def test_k9_a_rank_that_freezes_before_it_registers_is_named(tmp_path):
    freeze = tmp_path / "freeze"
    freeze.write_text("0")
    message, status = await start_failure(ranks=1, rank=("--freeze", str(freeze)), register_s=0.2)
    assert (message, status) == ("rank 0 failed to start: it did not register within 0.2 s", 1)
