"""One child process of the launcher: its output, its end."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from cp_client.interpreter import same_code_environment

ANNOUNCEMENTS = ("listening", "ready")
"""Lines `WORD grpc=HOST:PORT` on a child's stdout that mean something to the launcher."""

MAX_LINE = 1 << 16
OUTPUT_GRACE_S = 1.0
"""How long the output of a dead child is awaited: a grandchild may hold the pipe."""


class Child:
    """A started process. Stays in the launcher's session but in a process group of its own, so that Ctrl-C in the
    terminal reaches the launcher alone, who knows the order of stopping. Its stdin is a pipe that ends with the launcher.
    """

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.announced = {word: loop.create_future() for word in ANNOUNCEMENTS}
        self.exited: asyncio.Future[int] = loop.create_future()
        self.fatal = ""
        """What the child said on its `fatal: ` line, or what `condemn` said of it. It is not printed like other lines: `why`
        hands it to who reports it."""
        self.told = False
        """Whether `why` was asked, or `tell` called."""
        self._process = subprocess.Popen(
            argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
        )
        self._died: asyncio.Future[int] = loop.create_future()
        self._following = asyncio.ensure_future(self._follow())
        threading.Thread(target=self._wait, args=(loop,), name=f"wait-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once the exit has been noticed."""
        return not self._died.done()

    async def wait(self) -> int:
        """Exit status (negative: the signal), once the child has gone. Unlike awaiting `exited`, safe to cancel."""
        return await asyncio.shield(self.exited)

    def why(self) -> str:
        """One clause about the end of the child."""
        self.told = True
        if self.fatal:
            return self.fatal
        status = self._process.returncode
        if status is not None and status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exited with status {status}"

    def tell(self) -> None:
        """Prints the fatal line after all: nobody else will."""
        self.told = True
        if self.fatal:
            self._echo(f"fatal: {self.fatal}")

    def send(self, number: int) -> None:
        """Sends a signal; nothing happens if the child has gone."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def condemn(self, why: str) -> None:
        """SIGKILL; `why` is the reason of the end unless the child has given its own."""
        self.fatal = self.fatal or why
        self.send(signal.SIGKILL)

    def close_stdin(self) -> None:
        """Tells the child that its launcher is done."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; returns when the child has gone."""
        self.send(signal.SIGTERM)
        await asyncio.wait([self.exited], timeout=grace_s)
        if self.alive:
            self.send(signal.SIGKILL)
        await self.wait()
        self.close_stdin()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        status = self._process.wait()
        # The loop is closed only when the launcher is forced to end; then nobody listens any more.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._died.set_result, status)

    async def _follow(self) -> None:
        """Sets `exited` when the process has gone and its last words have been read, even if reading them failed."""
        try:
            await self._read_output()
        finally:
            self.exited.set_result(await asyncio.shield(self._died))

    async def _read_output(self) -> None:
        assert self._process.stdout is not None and self._process.stderr is not None
        loop = asyncio.get_running_loop()
        out, err = _Lines(self._on_stdout), _Lines(self._on_stderr)
        await loop.connect_read_pipe(lambda: out, self._process.stdout)
        await loop.connect_read_pipe(lambda: err, self._process.stderr)
        await asyncio.shield(self._died)
        await asyncio.wait([out.ended, err.ended], timeout=OUTPUT_GRACE_S)
        out.close()
        err.close()

    def _on_stdout(self, line: str) -> None:
        word, _, address = line.partition(" grpc=")
        future = self.announced.get(word)
        if future is None or not address:
            self._echo(line)
        elif not future.done():
            future.set_result(address.split()[0])

    def _on_stderr(self, line: str) -> None:
        if line.startswith("fatal: "):
            self.fatal = line.removeprefix("fatal: ")
        else:
            self._echo(line)

    def _echo(self, line: str) -> None:
        print(f"[{self.name}] {line}", file=sys.stderr, flush=True)


class _Lines(asyncio.Protocol):
    """Calls back for each line of a pipe; a line without end is cut at MAX_LINE bytes."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = b""
        self._transport: asyncio.BaseTransport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._on_line(line.decode(errors="replace").rstrip("\r"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._rest:
            self._on_line(self._rest.decode(errors="replace"))
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


POOL_WAIT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
"""Threads of a pool look so often (some 50 µs) whether there is work, then they sleep; but for GNU's runtime, at once.

A step of two threads hands work over some 200 times. Measured on 2 cores with SmolLM2-135M: at once asleep, a token took
1.4 times as long as with threads that look for 50 µs, and looking for longer gained no more. Ranks own their cores: beside
two processes that take both, this costs twice the time of sleeping at once, which OMP_WAIT_POLICY=PASSIVE asks for.
"""


def child_environment(threads: int) -> dict[str, str]:
    """The launcher's environment and code, with the thread pools of numeric libraries bounded.

    How their threads wait is `POOL_WAIT`, unless the environment says anything of it.
    """
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = same_code_environment()
    return {
        **({} if POOL_WAIT.keys() & environment.keys() else POOL_WAIT),
        **environment,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **dict.fromkeys(pools, str(threads)),
    }
