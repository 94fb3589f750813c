"""One question to grpc.health.v1, for container engines and scripts: `python -m cp_wire.healthcheck HOST:PORT`."""

import argparse
import sys
from collections.abc import Sequence

from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from cp_wire.channels import open_sync_channel
from cp_wire.errors import RpcError, from_rpc_error
from cp_wire.flags import integer

HEALTHY, UNHEALTHY = 0, 1
"""Exit statuses."""


def build_parser() -> argparse.ArgumentParser:
    """Flags of the check."""
    parser = argparse.ArgumentParser(
        prog="python -m cp_wire.healthcheck", description="Exit status 0 if the process at HOST:PORT serves, else 1."
    )
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--listening", action="store_true", help="content with any answer, also that it does not serve yet")
    parser.add_argument("--timeout", type=integer(1, 600), default=3, metavar="S", help="seconds for the answer (default: 3)")
    return parser


def complaint(target: str, listening: bool, timeout_s: float) -> str | None:
    """What is wrong with the process at `target`, in one clause; None if nothing is. Takes at most `timeout_s`."""
    with open_sync_channel(target, "control") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(HealthCheckRequest(), timeout=timeout_s)
        except RpcError as error:
            return from_rpc_error(error).message
    if listening or answer.status == HealthCheckResponse.SERVING:
        return None
    return HealthCheckResponse.ServingStatus.Name(answer.status)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = build_parser().parse_args(argv)
    wrong = complaint(args.target, args.listening, args.timeout)
    if wrong is None:
        return HEALTHY
    print(f"{args.target}: {wrong}", file=sys.stderr)
    return UNHEALTHY


if __name__ == "__main__":
    sys.exit(main())
