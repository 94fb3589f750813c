"""Freed memory goes back to the system."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rank_server import host_heap

HOLES = """
import torch
from benchmarks.memory import resident_bytes
from rank_server.host_heap import give_back_free_pages

torch.empty(8 << 20, dtype=torch.uint8).fill_(1)  # when it is freed, glibc keeps pieces of that size
pieces = [torch.empty(1 << 20, dtype=torch.uint8).fill_(1) for _ in range(64)]
del pieces[::2]
before = resident_bytes()
give_back_free_pages()
print(before - resident_bytes())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library gives memory back by itself")
def test_holes_between_what_is_held_are_given_back():
    freed = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, timeout=60, check=True).stdout
    assert int(freed) > 16 << 20


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(host_heap.ctypes, "CDLL", lambda name: SimpleNamespace())
    host_heap.give_back_free_pages()
