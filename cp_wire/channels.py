"""Every channel and server of the project is made here, from one table of options.

Limits hold per receiver and in both directions, so one factory for both ends is the only way to keep them equal.
"""

from typing import Literal

import grpc
import grpc.aio

Kind = Literal["control", "data", "prompt"]
"""What travels: commands and status; KV bytes; whole prompts (a million token ids are about 3 MB, packed)."""

MIB = 1 << 20
MAX_MESSAGE_BYTES: dict[Kind, int] = {"control": 4 * MIB, "data": 8 * MIB, "prompt": 32 * MIB}

_COMMON = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Keepalive alone misses a frozen peer; an unanswered ping closes the connection after this time. gRPC measures it at both
    # ends, by timers that go off although the answer waits to be read: a process that is starved for so long loses its
    # connections. So it is long; what has to notice a frozen peer sooner asks the application.
    ("grpc.http2.ping_timeout_ms", 20_000),
)
_CLIENT = (
    ("grpc.enable_http_proxy", 0),
    # A peer that restarts on its old address must not inherit the back-off of somebody else's channel.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_SERVER = (
    ("grpc.so_reuseport", 0),
    # The clients above ping idle connections; a server that counts strikes would answer GOAWAY.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # gRPC's own bound of 1000 answers CANCELLED, which says neither "busy" nor "try again"; the queue's limit does.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
)


def options(kind: Kind, *, server: bool) -> list[tuple[str, int]]:
    """Channel arguments for one end of a connection that carries `kind`."""
    limit = MAX_MESSAGE_BYTES[kind]
    sizes = (("grpc.max_send_message_length", limit), ("grpc.max_receive_message_length", limit))
    return [*sizes, *_COMMON, *(_SERVER if server else _CLIENT)]


def open_channel(target: str, kind: Kind) -> grpc.aio.Channel:
    """Channel for the running event loop to `target` (HOST:PORT); connects lazily."""
    return grpc.aio.insecure_channel(target, options=options(kind, server=False))


def open_sync_channel(target: str, kind: Kind) -> grpc.Channel:
    """Blocking channel to `target` (HOST:PORT), usable from any thread; connects lazily."""
    return grpc.insecure_channel(target, options=options(kind, server=False))


def new_server(kind: Kind) -> grpc.aio.Server:
    """Server for the running event loop that accepts `kind`; `cp_wire.serve.Server` wraps it."""
    return grpc.aio.server(options=options(kind, server=True))
