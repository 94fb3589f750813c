"""The C library's heap."""

import ctypes


def give_back_free_pages() -> None:
    """Returns freed memory to the system where the C library can (glibc), else does nothing.

    glibc keeps what is freed in pieces of up to 32 MiB for later: after a load that is as much as the matrices that were
    packed, and nobody will ask for it again.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
