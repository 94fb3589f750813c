"""`python -m benchmarks.member PARENT MODULE …`: runs a module of this package, until the process PARENT ends at the latest.

The system sees to that from the beginning, whatever the process is doing: importing, or waiting for others outside of Python.
"""

import ctypes
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence

from cp_client.interpreter import same_code_environment

_PR_SET_PDEATHSIG = 1


def start_member(module: str, *words: str) -> subprocess.Popen[bytes]:
    """`python -m MODULE WORDS…`, which Ctrl-C does not reach. For the main thread: its end is taken for the process's."""
    command = [sys.executable, "-m", "benchmarks.member", str(os.getpid()), module, *words]
    return subprocess.Popen(command, env=same_code_environment(), process_group=0)


def become(words: Sequence[str]) -> None:
    """PARENT MODULE …; ends the process where the parent has gone already."""
    parent, module, *sys.argv[1:] = words
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(f"the process {parent} that wanted {module} has gone")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    become(sys.argv[1:])
