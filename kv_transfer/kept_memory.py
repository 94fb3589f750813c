"""Messages come and go in memory that the process keeps.

The C library returns freed pages to the system at once when they lie at the end of its heap or are as large as a message: the
next message then takes a fault for every page of it, at both ends and several times, as gRPC's own buffers are no different.
On a virtual machine those faults took a third of a transfer's CPU time.
"""

import ctypes

# Of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

KEPT_BYTES = 64 << 20
"""Freed memory at the end of a heap that is not returned: as much as may be in flight."""
HEAP_BYTES = 8 << 20
"""Larger pieces still come from the system and return to it: none of a message is."""


def keep_freed_memory() -> bool:
    """From now on, for the whole process; False where the C library has no such setting. Idempotent."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(_MMAP_THRESHOLD, HEAP_BYTES))
