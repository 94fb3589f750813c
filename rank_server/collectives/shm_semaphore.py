"""POSIX semaphores in shared memory, the only thing that members of a shared-memory group wait for.

They carry the memory order: POSIX names sem_post, sem_trywait and sem_clockwait among the functions that synchronise memory, so
whatever a member wrote before its post is seen by the member whose wait took that post. This holds on every architecture, with
the C library's own atomics and fences; nothing here relies on the order of plain stores.
"""

import ctypes
import time

SEMAPHORE_BYTES = 64
"""Room for one sem_t (32 bytes in 64-bit Linux C libraries), alone in its cache line."""
CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphores:
    """The C library's calls, on addresses; raises OSError when it lacks one of them."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        try:
            self._init, self._clockwait = library.sem_init, library.sem_clockwait
            self.post, self.try_wait = library.sem_post, library.sem_trywait
        except AttributeError as error:
            raise OSError(f"the C library has no {error.args[0].split()[-1]}") from error
        self._init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        self._clockwait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))
        for call in (self.post, self.try_wait):
            # 0 = done; a failed try_wait is -1.
            call.argtypes = (ctypes.c_void_p,)

    def create(self, address: int) -> None:
        """Makes a semaphore with value 0 that processes share."""
        if self._init(address, 1, 0) != 0:
            raise OSError("sem_init failed")

    def wait(self, address: int, seconds: float) -> bool:
        """Takes one post, waiting so long at most; False when none came or a signal interrupted."""
        nanoseconds = time.monotonic_ns() + int(seconds * 1e9)
        until = _Timespec(nanoseconds // 10**9, nanoseconds % 10**9)
        return bool(self._clockwait(address, CLOCK_MONOTONIC, ctypes.byref(until)) == 0)
