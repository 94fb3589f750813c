"""Backends between real processes: what they promise when members die, freeze or leave."""

import signal
import time
from collections.abc import Iterator

import pytest

from rank_server.collectives.gloo import GlooBackend
from rank_server.collectives.nccl import NcclBackend
from rank_server.collectives.shm import ShmBackend
from rank_server.collectives.table import backends
from tests.rank_server.collectives.processes import DEADLINE_S, Start

NAMES = ("gloo", "shm")
NOTICED_S = {"gloo": 5.0, "shm": 2.0}
"""Bounds that hold on a busy machine; on an idle one gloo takes 60 ms and shm 20."""


@pytest.fixture
def start() -> Iterator[Start]:
    starter = Start()
    yield starter
    starter.stop()


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "size", "count"), [("gloo", 3, 100), ("shm", 3, 1000), pytest.param("shm", 8, 300, marks=pytest.mark.sweep)]
)
def test_mixed_operations_between_processes(start: Start, name: str, size: int, count: int) -> None:
    members = start(name, f"mixed-{count}", size, 30.0)
    assert [member.line() for member in members] == [f"{count} operations"] * size
    assert [member.process.wait(DEADLINE_S) for member in members] == [0] * size


@pytest.mark.cluster
@pytest.mark.parametrize("name", NAMES)
def test_m1_a_killed_peer_frees_the_survivors_long_before_the_timeout(start: Start, name: str) -> None:
    members = start(name, "endless", 3, 300.0)
    assert [member.line() for member in members] == ["running"] * 3
    members[1].process.kill()
    killed = time.monotonic()
    survivors = (members[0], members[2])
    assert all(member.line().startswith("lost: group g, member") for member in survivors)
    assert time.monotonic() - killed < NOTICED_S[name]
    assert [member.process.wait(DEADLINE_S) for member in survivors] == [0, 0]


@pytest.mark.cluster
@pytest.mark.parametrize("name", NAMES)
def test_m1_a_frozen_peer_ends_in_the_timeout(start: Start, name: str) -> None:
    members = start(name, "endless", 2, 1.0)
    assert [member.line() for member in members] == ["running"] * 2
    members[1].process.send_signal(signal.SIGSTOP)
    frozen = time.monotonic()
    assert members[0].line().startswith("lost: group g, member 0 of 2: all_reduce failed")
    assert time.monotonic() - frozen < 10.0
    assert members[0].process.wait(DEADLINE_S) == 0


@pytest.mark.cluster
@pytest.mark.parametrize("name", NAMES)
def test_m2_a_process_that_closes_a_running_operation_exits_cleanly_and_at_once(start: Start, name: str) -> None:
    members = start(name, "leaving", 2, 300.0)
    assert [member.line() for member in members] == ["running"] * 2
    assert members[0].line().startswith("lost: group g")
    assert members[0].process.wait(DEADLINE_S) == 0


def test_backends_by_name() -> None:
    rows = backends("127.0.0.1")
    assert list(rows) == ["gloo", "shm", "nccl"]
    assert [type(rows[name]()) for name in ("gloo", "shm")] == [GlooBackend, ShmBackend]
    assert rows["nccl"] is NcclBackend
