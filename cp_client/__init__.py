"""Asks: `from cp_client import Client, AsyncClient, errors`.

The clients are imported when they are first named, so that the parts of this package that need no gRPC start fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cp_client import errors
    from cp_client.async_client import AsyncClient
    from cp_client.client import Client

__all__ = ["AsyncClient", "Client", "errors"]

_HOMES = {"AsyncClient": "cp_client.async_client", "Client": "cp_client.client"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
