"""What only gloo can get wrong: the addresses it binds."""

import socket

import pytest

from rank_server.collectives.gloo import GlooBackend, _cause


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


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            "[pair.cc:534] Read error [127.0.0.1]:3729: Connection reset by peer. This is typically x",
            "Read error [peer]: Connection reset by peer",
        ),
        ("[pair.cc:547] Connection closed by peer [2001:db8::7%eth0]:1223", "Connection closed by peer [peer]"),
        ("no connection to any address of (worker-3.example, 29500)", "no connection to any address of [peer]"),
        ("connect 10.0.0.7:99 refused by 10.0.0.8", "connect [peer] refused by [peer]"),
        ("not finished within 2.5 s", "not finished within 2.5 s"),
    ],
)
def test_causes_name_no_address(said: str, cause: str) -> None:
    assert _cause(RuntimeError(said)) == cause
