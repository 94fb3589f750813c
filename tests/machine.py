"""What tests ask the machine they run on: a free port, and which processes live."""

import os
import select
import socket
from contextlib import suppress
from pathlib import Path


def free_port() -> int:
    """Nothing listened there on 127.0.0.1 a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """Processes that the main thread of a process has started and that it has not waited for yet."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_gone(pid: int, deadline_s: float) -> None:
    """Blocks until a process that is nobody's child of ours has ended."""
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            assert select.select([fd], [], [], deadline_s)[0], f"process {pid} is still there"
        finally:
            os.close(fd)
