"""gloo between real processes, and what it binds."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from rank_server.collectives.gloo import GlooBackend
from rank_server.collectives.table import backends

DEADLINE_S = 60.0


class Member:
    """A process of `member_process`."""

    def __init__(self, mode: str, index: int, size: int, timeout_s: float, bootstrap: str = "") -> None:
        module = "tests.rank_server.collectives.member_process"
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, mode, str(index), str(size), str(timeout_s), bootstrap],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        self._stdout = self.process.stdout.fileno()
        self._unread = b""

    def line(self) -> str:
        """Next line of output; AssertionError at the deadline or when the process ends."""
        deadline = time.monotonic() + DEADLINE_S
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "no output before the deadline"
            piece = os.read(self._stdout, 4096)
            assert piece, f"ended with {self.process.wait(DEADLINE_S)}"
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        return line.decode()


@pytest.fixture
def start() -> Iterator["Start"]:
    starter = Start()
    yield starter
    for member in starter.members:
        member.process.kill()
        member.process.wait(DEADLINE_S)
        assert member.process.stdin is not None and member.process.stdout is not None
        member.process.stdin.close()
        member.process.stdout.close()


class Start:
    """Starts members that all find one another."""

    def __init__(self) -> None:
        self.members: list[Member] = []

    def __call__(self, mode: str, size: int, timeout_s: float) -> list[Member]:
        self.members.append(Member(mode, 0, size, timeout_s))
        bootstrap = self.members[0].line()
        self.members += [Member(mode, index, size, timeout_s, bootstrap) for index in range(1, size)]
        return self.members


@pytest.mark.cluster
def test_hundred_mixed_operations_between_processes(start: Start) -> None:
    members = start("mixed", 3, 30.0)
    assert [member.line() for member in members] == ["100 operations"] * 3
    assert [member.process.wait(DEADLINE_S) for member in members] == [0, 0, 0]


@pytest.mark.cluster
def test_m1_a_killed_peer_frees_the_survivors_long_before_the_timeout(start: Start) -> None:
    members = start("endless", 3, 300.0)
    assert [member.line() for member in members] == ["running"] * 3
    members[1].process.kill()
    killed = time.monotonic()
    for member in (members[0], members[2]):
        assert member.line().startswith("lost: group g, member")
        assert time.monotonic() - killed < 5.0
        assert member.process.wait(DEADLINE_S) == 0


@pytest.mark.cluster
def test_m1_a_frozen_peer_ends_in_the_timeout(start: Start) -> None:
    members = start("endless", 2, 1.0)
    assert [member.line() for member in members] == ["running"] * 2
    members[1].process.send_signal(signal.SIGSTOP)
    frozen = time.monotonic()
    assert members[0].line().startswith("lost: group g, member 0 of 2: all_reduce failed")
    assert time.monotonic() - frozen < 10.0
    assert members[0].process.wait(DEADLINE_S) == 0


@pytest.mark.cluster
def test_m2_a_process_that_closes_a_running_operation_exits_cleanly_and_at_once(start: Start) -> None:
    members = start("leaving", 2, 300.0)
    assert [member.line() for member in members] == ["running"] * 2
    assert members[0].line().startswith("lost: group g")
    assert members[0].process.wait(DEADLINE_S) == 0


def test_the_store_is_bound_to_the_given_address_only() -> None:
    backend = GlooBackend("127.0.0.1")
    host, _, port = backend.prepare("g", [0, 1]).decode().rpartition(":")
    assert host == "127.0.0.1"
    with socket.create_connection((host, int(port)), timeout=5.0):
        pass
    # A listener on all addresses would take this one too.
    with socket.create_server(("127.0.0.2", int(port))):
        pass


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_a_wildcard_address_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="wildcard"):
        GlooBackend(host)


def test_backends_by_name() -> None:
    table = backends("127.0.0.1")
    assert sorted(table) == ["auto", "gloo"]
    assert all(isinstance(make(), GlooBackend) for make in table.values())
