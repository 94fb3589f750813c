"""Memory through which the payloads of a transfer go when both ends are on one host.

The reader of a transfer makes it and tells the source where it is; the source writes payloads into its slots. It is an
anonymous file without a name: nothing can be left behind, however either process ends. The source opens it through
/proc/PID/fd/N, which the kernel allows to processes of the same user and PID namespace, and only writes to a file of ours
that begins with the key it was given and that can no longer shrink under it.
"""

import fcntl
import mmap
import os
import secrets

from cp_wire.errors import ConfigRefused
from cp_wire.pb import kv_transfer_pb2 as pb

PAGE = 4096
MAX_BYTES = 1 << 30
_NAME = "kvloom-transfer"
_MAGIC = b"kvloomT1"
_KEY_BYTES = 16


class SharedSlots:
    """A mapping of the memory: slots of `slot_bytes`. Unmapped with the object and the last view of a slot."""

    def __init__(self, fd: int, slot_bytes: int, slots: int) -> None:
        """Maps the descriptor and leaves it open. Raises OSError."""
        self._memory = mmap.mmap(fd, PAGE + slot_bytes * slots)
        self.slot_bytes = slot_bytes
        self.slots = slots

    def slot(self, index: int, size: int) -> memoryview:
        """The first `size` bytes of a slot; IndexError when that is not inside it."""
        if not (0 <= index < self.slots and 0 <= size <= self.slot_bytes):
            raise IndexError(f"{size} bytes of slot {index}: there are {self.slots} slots of {self.slot_bytes} bytes")
        start = PAGE + index * self.slot_bytes
        return memoryview(self._memory)[start : start + size]


class Offer:
    """What the reading end makes: memory for its source, to be opened until `close`."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        """Raises OSError when the system has no such memory."""
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size = PAGE + slot_bytes * slots
            self._key = secrets.token_bytes(_KEY_BYTES)
            os.ftruncate(self._fd, size)
            os.pwrite(self._fd, _MAGIC + self._key, 0)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.slots = SharedSlots(self._fd, slot_bytes, slots)
        except OSError:
            os.close(self._fd)
            raise

    def message(self) -> pb.SharedMemory:
        """Where the source finds it."""
        size = PAGE + self.slots.slot_bytes * self.slots.slots
        return pb.SharedMemory(pid=os.getpid(), fd=self._fd, key=self._key, bytes=size)

    def close(self) -> None:
        """Nobody can open it from now on. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_offer(message: pb.SharedMemory, slot_bytes: int, slots: int) -> SharedSlots:
    """Maps what an `Offer` describes; `ConfigRefused` when it is gone, is something else, or has another size."""
    wanted = PAGE + slot_bytes * slots
    if message.bytes < wanted or message.bytes > MAX_BYTES:
        raise ConfigRefused(f"shared memory of {message.bytes} bytes for {slots} slots of {slot_bytes} bytes")
    path = f"/proc/{message.pid}/fd/{message.fd}"
    try:
        # Without the look at the link, opening could wake a device or hang in a pipe.
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise ConfigRefused("the descriptor is no memory for a transfer")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigRefused(f"shared memory of another process cannot be opened: {error.strerror}") from error
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        key = os.pread(fd, len(_MAGIC) + _KEY_BYTES, 0)
        if not sealed or key != _MAGIC + message.key or os.fstat(fd).st_size < wanted:
            raise ConfigRefused("the descriptor is not the memory that was offered")
        return SharedSlots(fd, slot_bytes, slots)
    except OSError as error:
        raise ConfigRefused(f"shared memory cannot be mapped: {error.strerror}") from error
    finally:
        os.close(fd)
