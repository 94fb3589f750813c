"""How far the ranks are with their weights: bars on a terminal, a line now and then elsewhere."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from cp_wire.channels import open_channel
from cp_wire.errors import RpcError, from_rpc_error
from cp_wire.logs import get_logger
from cp_wire.pb import coordinator_pb2, coordinator_pb2_grpc
from cp_wire.words import percent

log = get_logger("launcher")

POLL_S = 0.25
POLL_TIMEOUT_S = 5.0
LINE_INTERVAL_S = 3.0
"""Between two lines where there is no terminal."""

Show = Callable[[Mapping[int, float]], None]
"""Takes the loaded fraction, 0 … 1, by rank."""


@contextmanager
def display(console: Console) -> Iterator[Show]:
    """Bars below whatever else is printed on the terminal meanwhile; the launcher's log where the console is none."""
    if not console.is_terminal:
        yield Lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {}

        def show(fractions: Mapping[int, float]) -> None:
            for rank, fraction in fractions.items():
                if rank not in tasks:
                    tasks[rank] = progress.add_task(f"rank {rank} loads its weights", total=1.0)
                progress.update(tasks[rank], completed=fraction)

        yield show


class Lines:
    """One log line each LINE_INTERVAL_S as long as something is loading; none for a start that is quicker than that."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock() + LINE_INTERVAL_S

    def __call__(self, fractions: Mapping[int, float]) -> None:
        if self._clock() < self._next or all(fraction == 1.0 for fraction in fractions.values()):
            return
        self._next = self._clock() + LINE_INTERVAL_S
        log.info("ranks load their weights", loaded=" ".join(f"{rank}:{percent(part, 0)}" for rank, part in fractions.items()))


def loaded(status: coordinator_pb2.GetStatusResponse) -> dict[int, float]:
    """Loaded fraction by rank, of those that have come."""
    return {rank.rank: rank.load_fraction for rank in status.ranks if rank.state != "absent"}


async def follow_loading(target: str) -> None:
    """Shows what the coordinator's status says about the ranks; runs until it is cancelled."""
    async with open_channel(target, "prompt") as channel:
        control = coordinator_pb2_grpc.ControlServiceStub(channel)
        with display(Console(file=sys.stderr)) as show:
            while True:
                try:
                    status = await control.GetStatus(coordinator_pb2.GetStatusRequest(), timeout=POLL_TIMEOUT_S)
                    show(loaded(status))
                except RpcError as error:
                    log.debug("no status", why=from_rpc_error(error).message)
                await asyncio.sleep(POLL_S)
