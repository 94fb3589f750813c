"""What this host's ranks can compute on, asked before any of them starts."""

import ctypes
import json
import subprocess
import sys

from cp_wire.errors import ConfigRefused

DRIVER = "libcuda.so.1"
PROBE_S = 120.0
"""Bound on the import of torch in a process of its own."""


def local_device(asked: str, num_ranks: int) -> str:
    """`cpu` or `cuda` for all of num_ranks ranks on this host; `auto` is cuda where each can have a GPU of its own.

    `ConfigRefused` gives the reason when cuda was asked for and can't be had.
    """
    if asked == "cpu":
        return asked
    count, reason = local_gpus()
    if count >= num_ranks:
        return "cuda"
    if asked == "auto":
        return "cpu"
    raise ConfigRefused(
        f"device cuda is absent: {reason or f'each rank needs a GPU, {num_ranks} in all, this host has {count}'}"
    )


def local_gpus() -> tuple[int, str]:
    """Number of GPUs that ranks of this host can use, and if 0, the reason. Asks torch only where there is a driver."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return 0, f"this host has no NVIDIA driver ({DRIVER})"
    command = [sys.executable, "-m", "rank_server.device"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=True)
        count, reason = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return 0, f"torch can't be asked for GPUs ({type(error).__name__})"
    return count, reason
