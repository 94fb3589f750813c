"""Collective backends by name."""

from collections.abc import Callable, Mapping
from functools import partial

from rank_server.collectives.base import Backend
from rank_server.collectives.gloo import GlooBackend
from rank_server.collectives.nccl import NcclBackend
from rank_server.collectives.shm import ShmBackend


def backends(host: str) -> Mapping[str, Callable[[], Backend]]:
    """Name → constructor of the backend on this host, one row each.

    The coordinator names one of them to all ranks; no rank chooses for itself.
    """
    return {"gloo": partial(GlooBackend, host), "shm": ShmBackend, "nccl": NcclBackend}
