"""Host memory that is read as fast as it can be.

Weights and cache are read through once per token. In pages of 4 KiB the processor looks up an address every 64 cache lines, and
its prefetchers stop there; in huge pages (2 MiB) a sum over 512 MiB took 0.72 to 0.76 times as long, on a virtual machine with
two cores. Linux gives them to memory that asks for them (transparent_hugepage: madvise), as far as it has any.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20


def host_zeros(size: int) -> Tensor:
    """[size] uint8 zeros on the host, which take memory when they are first touched, a huge page at a time where the system has
    such; the first lies at the begin of a page. MemoryError when the system refuses."""
    try:
        memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes of host memory: {error}") from error
    with suppress(OSError):  # a kernel without huge pages refuses them; everything else is the same
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[first : first + size]
