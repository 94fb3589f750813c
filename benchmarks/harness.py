"""What every benchmark shares: a cluster to measure, where it ran, one JSON document out."""

import json
import os
import platform
import signal
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.endings import ending_in_order
from cp_client import Client
from cp_client.guard import guarded
from cp_client.interpreter import same_code_environment
from cp_wire import process
from cp_wire.command_line import CommandParser
from cp_wire.errors import KvloomError
from cp_wire.flags import integer

STOP_S = 30.0
REFERENCES = ("transformers", "accelerate")
"""Packages that write seeded models and that ranks are compared with; the product needs neither."""


def parser(name: str, what: str, plot: str | None = None) -> ArgumentParser:
    """Flags that all benchmarks have, and `--plot FILE` for those that draw: `plot` says what."""
    result = CommandParser(prog=f"kvloom bench {name}", description=what)
    result.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
    if plot is not None:
        result.add_argument("--plot", type=picture, metavar="FILE", help=f"also draw {plot} as an SVG picture")
    return result


def picture(text: str) -> Path:
    """Parser of where a picture goes; ArgumentTypeError where it could not be written, before anything is measured for it."""
    path = Path(text)
    if os.path.isdir(path):
        raise ArgumentTypeError(f"{text!r} is a directory, not a file to draw to")
    if os.path.exists(path):
        if not os.access(path, os.W_OK):
            raise ArgumentTypeError(f"{text!r} cannot be written")
    elif not (os.path.isdir(path.parent) and os.access(path.parent, os.W_OK | os.X_OK)):
        raise ArgumentTypeError(f"{text!r} cannot be made: '{path.parent}' is not a directory that can be written to")
    return path


def run_benchmark(main: Callable[[], int]) -> int:
    """The exit status of a benchmark's `main`, ended as `guarded` and `ending_in_order` say.

    What a cluster answers instead of a result is the last line on stderr, `fatal: MESSAGE`: status 2 where it refuses what was
    asked for, such as a prompt beyond the model's length, 1 where it fails. So is one of REFERENCES that is not installed: 1.
    """

    def reported() -> int:
        try:
            with ending_in_order():
                return main()
        except KvloomError as error:
            return process.report(error)
        except ModuleNotFoundError as error:
            if error.name not in REFERENCES:
                raise
            print(f"fatal: {error.name} is not installed: pip install -e '.[dev]' brings it", file=sys.stderr, flush=True)
            return process.FAILED

    return guarded(reported)


def integers(minimum: int, maximum: int | None = None) -> Callable[[str], list[int]]:
    """Parser of comma-separated whole numbers that are at least `minimum`, and at most `maximum` if there is one."""
    one = integer(minimum) if maximum is None else integer(minimum, maximum)
    return lambda text: [one(word) for word in text.split(",")]


@contextmanager
def cluster(*flags: str) -> Iterator[Client]:
    """`kvloom up` with these flags; its log goes to stderr. Stopped afterwards, also when the benchmark is told to go."""
    command = [sys.executable, "-m", "cp_client.cli", "up", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=same_code_environment()) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("ready grpc="):
                raise SystemExit(f"the cluster did not start: {' '.join(command)}")
            with Client(line.split("grpc=")[1].split()[0]) as client:
                yield client
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median with the range it was taken from."""
    return {"median": round(median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def machine() -> dict[str, Any]:
    """Where the figures were taken."""
    models = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": models[0] if models else platform.machine(),
        "python": platform.python_version(),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def report(
    args: Namespace, document: Mapping[str, Any], lines: Sequence[str], draw: Callable[[Path], None] | None = None
) -> None:
    """Prints the document, or its summary for people; then draws the picture, if `--plot` asks for it."""
    print(json.dumps(document, indent=2) if args.json else "\n".join(lines), flush=True)
    if draw is not None and args.plot is not None:
        draw(args.plot)
