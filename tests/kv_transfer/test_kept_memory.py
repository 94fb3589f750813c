"""Memory for messages is taken from the system once."""

import ctypes
import resource
import subprocess
import sys

import pytest

PAGE = 4096
COUNT = f"""
import resource, sys
from kv_transfer.kept_memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    held = [bytearray(size) for size in (2 << 20, 1 << 20, 3 << 20, 2 << 20)]
    for each in held:
        each[::{PAGE}] = b"x" * len(each[::{PAGE}])
use()
before = faults()
for _ in range(5):
    use()
print(faults() - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", COUNT, how], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="a C library without mallopt")
def test_pages_of_a_message_are_not_taken_anew_for_the_next_one() -> None:
    pages = 5 * (8 << 20) // resource.getpagesize()
    assert faults("keep") < pages / 50
    assert faults("leave") > pages / 4
