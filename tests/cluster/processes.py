"""Real clusters for tests: `kvloom up` as a subprocess, watched and always stopped."""

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cp_client import Client
from tests.machine import alive

KVLOOM = str(Path(sys.executable).parent / "kvloom")
START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 30.0


class RunningCluster:
    """A started `kvloom up`."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, stderr: Path) -> None:
        self.process = process
        self.address = address
        self.stderr = stderr
        self.client = Client(address)

    def status(self):
        return self.client.status()

    def rank_pids(self) -> dict[int, int]:
        return {rank.rank: rank.pid for rank in self.status().ranks}

    def wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> float:
        """Polls until the condition holds; returns how long it took; fails with `what` after the deadline."""
        start = time.monotonic()
        while not condition():
            if time.monotonic() - start > seconds:
                raise AssertionError(f"{what} did not happen within {seconds} s\n{self.stderr.read_text()[-4000:]}")
            time.sleep(0.02)
        return time.monotonic() - start

    def all_blocks_free(self) -> bool:
        return all(rank.kv_blocks_free == rank.kv_blocks_total > 0 for rank in self.status().ranks)


@contextmanager
def kvloom_up(*args: str, log: Path) -> Iterator[RunningCluster]:
    """Starts the cluster and waits for its `ready` line; afterwards no process of it may be left."""
    with log.open("wb") as stderr:
        process = subprocess.Popen([KVLOOM, "up", *args], stdout=subprocess.PIPE, stderr=stderr)
    try:
        address = _ready(process, log)
        running = RunningCluster(process, address, log)
        yield running
        running.client.close()
        descendants = descendants_of(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_DEADLINE_S) == 0, log.read_text()[-4000:]
        assert not [pid for pid in descendants if alive(pid)]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                for pid in [*descendants_of(process.pid), process.pid]:
                    os.kill(pid, signal.SIGKILL)
                process.wait(STOP_DEADLINE_S)
        assert process.stdout is not None
        process.stdout.close()


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(START_DEADLINE_S):
            raise AssertionError(f"no ready line within {START_DEADLINE_S} s\n{log.read_text()[-4000:]}")
    line = process.stdout.readline().decode()
    found = re.fullmatch(r"ready grpc=(\S+)\n", line)
    if found is None:
        raise AssertionError(f"expected a ready line, got {line!r}\n{log.read_text()[-4000:]}")
    return found[1]


def descendants_of(pid: int) -> list[int]:
    """All living descendants, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, pending = [], [pid]
    while pending:
        for child in children.get(pending.pop(), []):
            found.append(child)
            pending.append(child)
    return found


def members_of_session(session: int) -> list[int]:
    """All living processes of a process session, from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive(int(entry.name)):
            try:
                if os.getsid(int(entry.name)) == session:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found
