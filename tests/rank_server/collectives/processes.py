"""Members of a group as processes."""

import os
import select
import subprocess
import sys
import time

DEADLINE_S = 60.0


class Member:
    """A process of `member_process`."""

    def __init__(self, backend: str, mode: str, index: int, size: int, timeout_s: float, bootstrap: str = "") -> None:
        module = "tests.rank_server.collectives.member_process"
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, backend, mode, str(index), str(size), str(timeout_s), bootstrap],
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


class Start:
    """Starts members that all find one another."""

    def __init__(self) -> None:
        self.members: list[Member] = []

    def __call__(self, backend: str, mode: str, size: int, timeout_s: float) -> list[Member]:
        self.members.append(Member(backend, mode, 0, size, timeout_s))
        bootstrap = self.members[0].line()
        self.members += [Member(backend, mode, index, size, timeout_s, bootstrap) for index in range(1, size)]
        return self.members

    def stop(self) -> None:
        """Kills all that still run."""
        for member in self.members:
            member.process.kill()
            member.process.wait(DEADLINE_S)
            assert member.process.stdin is not None and member.process.stdout is not None
            member.process.stdin.close()
            member.process.stdout.close()
