"""Arguments of the commands that ask a running cluster, and what they say when it does not answer."""

import math
from argparse import ArgumentParser, ArgumentTypeError

from cp_wire.errors import DeadlineExceeded, KvloomError

MAX_TIMEOUT_S = 1e6
MAX_PORT = 65535


def add_server_arguments(parser: ArgumentParser, timeout_s: float) -> None:
    """`--target HOST:PORT`, required, and `--timeout SECONDS`."""
    parser.add_argument("--target", type=target, required=True, metavar="HOST:PORT", help="address of the coordinator")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=timeout_s,
        metavar="SECONDS",
        help=f"how long the whole answer may take (default: {timeout_s:g})",
    )


def sentence(error: KvloomError) -> str:
    """What to tell about a failed call."""
    if isinstance(error, DeadlineExceeded) and not error.is_told:
        return f"{error.message} (--timeout)"
    return error.message


def target(text: str) -> str:
    """HOST:PORT with a port from 1 to 65535; an IPv6 address stands in brackets."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host.replace(":", "/")
    if not colon or not bare or "/" in bare or not bare.isprintable() or " " in bare:
        raise ArgumentTypeError(f"{text!r} is not HOST:PORT such as 127.0.0.1:50051 or [::1]:50051")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= MAX_PORT):
        raise ArgumentTypeError(f"{text!r} has port {port!r}, it must be from 1 to {MAX_PORT}")
    return text


def seconds(text: str) -> float:
    """A time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_TIMEOUT_S:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and at most {MAX_TIMEOUT_S:.0f}")
    return value
