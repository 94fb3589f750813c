"""What only gloo can get wrong: the addresses it binds."""

import socket

import pytest

from rank_server.collectives.gloo import GlooBackend


def test_the_store_is_bound_to_the_given_address_only() -> None:
    backend = GlooBackend("127.0.0.1")
    host, _, port = backend.prepare("g", [0, 1]).decode().rpartition(":")
    assert host == "127.0.0.1"
    with socket.create_connection((host, int(port)), timeout=5.0):
        pass
    # A listener on all addresses would take this one too.
    with socket.create_server(("127.0.0.2", int(port))):
        pass


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_a_wildcard_address_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="wildcard"):
        GlooBackend(host)
