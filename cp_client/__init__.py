"""Asks: `from cp_client import Client, AsyncClient, errors`.

The clients are imported when they are first named, so that the parts of this package that need no gRPC start fast; the
command line's guard against Ctrl-C is one of them, so nothing at all is imported here.
"""

from __future__ import annotations

TYPE_CHECKING = False
"""What `typing` has under this name; it would take milliseconds to import."""
if TYPE_CHECKING:
    from typing import Any

    from cp_client import errors
    from cp_client.async_client import AsyncClient
    from cp_client.client import Client

__all__ = ["AsyncClient", "Client", "errors"]

_HOMES = {"AsyncClient": "cp_client.async_client", "Client": "cp_client.client"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
