"""A pool that other processes of this host may read: what is taken over on one host is copied once, from pool to pool.

The memory is an anonymous file without a name: nothing can be left behind, however its processes end. A reader opens it
through /proc/PID/fd/N, which the kernel allows to processes of the same user and PID namespace, and maps it for reading
only. `open_pools` keeps the mappings and lets go of those whose owners are gone.
"""

import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cp_wire.errors import ConfigRefused
from cp_wire.pb import kv_transfer_pb2 as pb

PAGE = 4096
_NAME = "kvloom-kv"
_MAGIC = b"kvloomKV"
_KEY_BYTES = 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

Bytes = NDArray[np.uint8]


class SharedPool:
    """The owner's end: `data` [size] zeros, which take memory when they are first written. `close` ends further opening; the
    memory itself lives until the last view of it is gone."""

    def __init__(self, size: int) -> None:
        """Raises OSError when the system has no such memory."""
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self._key = secrets.token_bytes(_KEY_BYTES)
            self._bytes = PAGE + size
            os.ftruncate(self._fd, self._bytes)
            os.pwrite(self._fd, _MAGIC + self._key, 0)
            # A file that shrank under a reader would kill it.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self.data: Bytes = np.frombuffer(mmap.mmap(self._fd, self._bytes), np.uint8, offset=PAGE)
        except OSError:
            os.close(self._fd)
            raise

    def message(self) -> pb.SharedPool:
        """Where a reader finds it."""
        return pb.SharedPool(pid=os.getpid(), fd=self._fd, key=self._key, bytes=self._bytes)

    def close(self) -> None:
        """Nobody can open it from now on. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True, slots=True)
class MappedPool:
    """A reader's end: `data` is read-only, and unmapped with the last view of it."""

    data: Bytes
    _path: str
    """Where the kernel shows the memory while its owner lives and has not closed it."""
    _inode: int

    def owned(self) -> bool:
        """Whether its owner still lives and offers it."""
        try:
            return os.stat(self._path).st_ino == self._inode
        except OSError:
            return False


def open_pool(message: pb.SharedPool, size: int) -> MappedPool:
    """The [size] bytes of a `SharedPool`; `ConfigRefused` when it is gone or is something else."""
    path = f"/proc/{message.pid}/fd/{message.fd}"
    try:
        # Without the look at the link, opening could wake a device or hang in a pipe.
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise ConfigRefused("the descriptor is no KV pool")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigRefused(f"the KV pool of another process cannot be opened: {error.strerror}") from error
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        found = os.pread(fd, len(_MAGIC) + _KEY_BYTES, 0)
        status = os.fstat(fd)
        if not sealed or found != _MAGIC + message.key or status.st_size != PAGE + size:
            raise ConfigRefused("the descriptor is not the KV pool that was described")
        memory = mmap.mmap(fd, PAGE + size, mmap.MAP_SHARED, mmap.PROT_READ)
        # By the descriptor that is held: the owner may be gone by now, and the path with it.
        return MappedPool(np.frombuffer(memory, np.uint8, offset=PAGE), path, status.st_ino)
    except OSError as error:
        raise ConfigRefused(f"the KV pool of another process cannot be mapped: {error.strerror}") from error
    finally:
        os.close(fd)
