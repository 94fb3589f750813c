"""What is said when a cluster is stopped while it works."""

import sys

from cp_wire.channels import open_channel
from cp_wire.errors import RpcError, from_rpc_error
from cp_wire.logs import get_logger
from cp_wire.pb import coordinator_pb2, coordinator_pb2_grpc
from cp_wire.words import counted

log = get_logger("launcher")

STATUS_TIMEOUT_S = 1.0
"""The stop waits for this answer."""


async def tell_of_requests(address: str) -> None:
    """One line on stderr if the coordinator at `address` has requests that it will finish first; nothing if it does not say."""
    async with open_channel(address, "prompt") as channel:
        control = coordinator_pb2_grpc.ControlServiceStub(channel)
        try:
            status = await control.GetStatus(coordinator_pb2.GetStatusRequest(), timeout=STATUS_TIMEOUT_S)
        except RpcError as error:
            log.debug("no status", why=from_rpc_error(error).message)
            return
    active = status.running + status.waiting
    if active:
        print(f"kvloom: draining {counted(active, 'request')}, Ctrl-C again to force the end", file=sys.stderr, flush=True)
