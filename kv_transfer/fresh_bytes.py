"""A `bytes` object that is filled where it lies, for interfaces that take nothing else.

Python's own ways to make one of parts copy the parts. Its C interface gives out an object of a wanted size with undefined
content, and allows its maker to fill it as long as nobody else has seen it.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_new = ctypes.pythonapi.PyBytes_FromStringAndSize
_new.argtypes, _new.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object
_address = ctypes.pythonapi.PyBytes_AsString
_address.argtypes, _address.restype = (ctypes.py_object,), ctypes.c_void_p


def filled(size: int, fill: Callable[[NDArray[np.uint8]], None]) -> bytes:
    """[size] bytes that `fill` has written to the array it is given, all of them; the array is not to be used afterwards."""
    if size < 2:
        # Objects of this size are shared.
        out = np.empty(size, np.uint8)
        fill(out)
        return out.tobytes()
    made: bytes = _new(None, size)
    fill(np.frombuffer(memoryview(_memory(size).from_address(_address(made))), np.uint8))
    return made


@lru_cache(maxsize=8)
def _memory(size: int) -> type[ctypes.Array[ctypes.c_char]]:
    """The type costs more to make than to fill a small one; messages are of few sizes."""
    return ctypes.c_char * size
