"""Collective backends by name."""

from collections.abc import Callable, Mapping
from functools import partial

from rank_server.collectives.base import Backend
from rank_server.collectives.gloo import GlooBackend


def backends(host: str) -> Mapping[str, Callable[[], Backend]]:
    """Name → constructor of the backend on this host, one row each; `auto` is the best that works for all members."""
    gloo = partial(GlooBackend, host)
    return {"auto": gloo, "gloo": gloo}
