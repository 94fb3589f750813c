"""How long a group's exchanges take, measured on one member."""

import time
from collections.abc import Callable
from statistics import median

import torch

from rank_server.collectives.base import Group
from rank_server.sequences import PlanRefused

MAX_PAYLOAD_BYTES = 1 << 26
MAX_REPEATS = 1000


def time_all_gather(
    group: Group, payload_bytes: int, repeats: int, device: torch.device, progress: Callable[[], None]
) -> float:
    """Median seconds of `repeats` all-gathers to which each member brings `payload_bytes`; one that is not timed goes first.

    `PlanRefused` for sizes and repeats beyond all reason, `CollectiveError` when a member is lost.
    """
    elements, rest = divmod(payload_bytes, torch.float32.itemsize)
    if rest or not (0 < payload_bytes <= MAX_PAYLOAD_BYTES and 0 < repeats <= MAX_REPEATS):
        raise PlanRefused(
            f"{repeats} exchanges of {payload_bytes} bytes are not timed: at most {MAX_REPEATS}, of floats, at most "
            f"{MAX_PAYLOAD_BYTES} bytes"
        )
    payload = torch.zeros(elements, device=device)
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        group.all_gather(payload)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
        progress()
    return median(times[1:])
