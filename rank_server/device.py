"""The device of a rank. `python -m rank_server.device` says how many GPUs torch can use here, or why none."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cp_wire.errors import ConfigRefused
from cp_wire.host_memory import PoolRefused

DEVICES = ("cpu", "cuda")
POOL_SHARE = 0.8
"""Part of a GPU's free memory, weights loaded, that the KV pool takes by default; the rest is for activations."""


def check_device(name: str) -> None:
    """`ConfigRefused` names a device that is none of `DEVICES`, or absent, and the reason."""
    if name not in DEVICES:
        raise ConfigRefused(f"device {name} is not one of {', '.join(DEVICES)}")
    if name == "cuda" and (reason := gpus()[1]):
        raise ConfigRefused(f"device cuda is absent: {reason}")


def claim(name: str, rank: int) -> torch.device:
    """The device that a global rank computes on, checked; with several GPUs, ranks take them in turn.

    Makes it the calling thread's current device, which is what kernels and collectives are launched on.
    """
    check_device(name)
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device(name, rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def gpus() -> tuple[int, str]:
    """Number of GPUs that torch can use, and if 0, the reason in words."""
    if torch.version.cuda is None:
        return 0, f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return 0, f"torch {torch.__version__} finds no usable GPU"
    return torch.cuda.device_count(), ""


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that nobody has taken."""
    return torch.cuda.mem_get_info(device)[0]


@contextmanager
def room_on(device: torch.device, what: str) -> Iterator[None]:
    """Turns a failed allocation on a GPU into `PoolRefused` that names what there was no room for."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise PoolRefused(f"{what} can't be had on {device}, {free_bytes(device)} bytes are free") from error


if __name__ == "__main__":
    print(json.dumps(gpus()))
