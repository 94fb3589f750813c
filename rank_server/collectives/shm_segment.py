"""The memory that the members of a same-host group share: where everything lies, who may map it, and who still lives.

A segment is an anonymous file (memfd): it has no name, so nothing can be left behind, however its processes end. The others
open it through /proc/PID/fd/N of the process that made it, which the kernel allows to processes of the same user and PID
namespace. Its memory is not bounded by the size of /dev/shm.

    header               magic, members, slot bytes, key
    control              per member: 16 words of 8 bytes (see `Control`)
    semaphores           [from, to]: one per ordered pair of members
    slots                [half, member]: two halves, for even and odd rounds, one slot of `slot_bytes` per member

A member that has joined holds a lock on byte `index` of the file, under a file description of its own. The kernel drops the
lock when the process ends, for whatever reason, and tells everybody who asks.
"""

import ctypes
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
import weakref

from rank_server.collectives.shm_semaphore import SEMAPHORE_BYTES, Semaphores

PAGE = 4096
CONTROL_WORDS = 16
MAX_MEMBERS = 256
_HEADER = struct.Struct("=8sQQ16s")
_MAGIC = b"kvloom01"
_FLOCK = "hhqqi4x"
_BOOTSTRAP = re.compile(rb"memfd:([0-9]{1,10}):([0-9]{1,10}):([0-9a-f]{32})")


class Control:
    """Word numbers in a member's control block; the words of a round exist for each half."""

    JOINED = 0
    """1 once the member holds its lock."""
    LEFT = 1
    """1 once the member has closed the group."""
    LAST_ROUND = 2
    """Valid with LEFT: the last round that the member completed."""
    ROUND = (4, 8)
    """Number of the round that the slot's content belongs to."""
    CALL = (5, 9)
    """What the member called: the operation's code."""
    TOTAL = (6, 10)
    """Bytes of the member's whole tensor."""


class Segment:
    """One member's mapping of a group's memory. Unmapped with the object: whoever uses an address must hold it."""

    def __init__(self, fd: int, size: int, slot_bytes: int, semaphores: Semaphores) -> None:
        """Takes the descriptor over."""
        self._closing = weakref.finalize(self, os.close, fd)
        self._fd = fd
        self.semaphores = semaphores
        self._control_at = _align(_HEADER.size, 64)
        self._semaphores_at = self._control_at + size * CONTROL_WORDS * 8
        memory = mmap.mmap(fd, _total_bytes(size, slot_bytes))
        self.memory = memory
        """Lives as long as anything that was made of it."""
        self.size = size
        self.slot_bytes = slot_bytes
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        words = memoryview(memory)[self._control_at : self._semaphores_at].cast("Q")
        self.control = [words[i * CONTROL_WORDS : (i + 1) * CONTROL_WORDS] for i in range(size)]
        """Per member, its words; each member writes its own only."""

    @classmethod
    def create(cls, size: int, slot_bytes: int, semaphores: Semaphores) -> "tuple[Segment, bytes]":
        """Makes a segment for `size` members; returns it with the bytes that `open` takes. Raises OSError."""
        key = secrets.token_bytes(16)
        fd = os.memfd_create("kvloom-collectives", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _total_bytes(size, slot_bytes))
            os.pwrite(fd, _HEADER.pack(_MAGIC, size, slot_bytes, key), 0)
        except OSError:
            os.close(fd)
            raise
        segment = cls(fd, size, slot_bytes, semaphores)
        for pair in range(size * size):
            semaphores.create(segment.semaphore(*divmod(pair, size)))
        return segment, f"memfd:{os.getpid()}:{fd}:{key.hex()}".encode()

    @classmethod
    def open(cls, bootstrap: bytes, size: int, semaphores: Semaphores) -> "Segment":
        """Maps what `create` made; raises OSError when it is gone, ValueError when it is something else."""
        found = _BOOTSTRAP.fullmatch(bootstrap)
        if found is None:
            raise ValueError(f"bootstrap {bootstrap!r} names no segment")
        pid, number, key = int(found[1]), int(found[2]), bytes.fromhex(found[3].decode())
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            header = os.pread(fd, _HEADER.size, 0) if stat.S_ISREG(status.st_mode) else b""
            if len(header) < _HEADER.size:
                raise ValueError("the descriptor is no segment")
            magic, members, slot_bytes, found_key = _HEADER.unpack(header)
            if (magic, members, found_key) != (_MAGIC, size, key):
                raise ValueError(f"the descriptor is no segment of {size} members with this key")
            if status.st_size != _total_bytes(size, slot_bytes):
                raise ValueError(f"the segment has {status.st_size} bytes")
        except (OSError, ValueError):
            os.close(fd)
            raise
        return cls(fd, size, slot_bytes, semaphores)

    def control_block(self, member: int) -> int:
        """Address of a member's words."""
        return self._address + self._control_at + member * CONTROL_WORDS * 8

    def semaphore(self, source: int, target: int) -> int:
        """Address of the semaphore that `source` posts and `target` waits for."""
        return self._address + self._semaphores_at + (source * self.size + target) * SEMAPHORE_BYTES

    def slot(self, half: int, member: int) -> int:
        """Address of a member's slot."""
        return self._address + self.slot_at(half, member)

    def slot_at(self, half: int, member: int) -> int:
        """The same as an offset in `memory`."""
        return _slots_at(self.size) + (half * self.size + member) * self.slot_bytes

    def join(self, index: int) -> None:
        """Takes the member's place; raises OSError when another process has it."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _byte_lock(index))
        self.control[index][Control.JOINED] = 1

    def alive(self, index: int) -> bool:
        """Whether a member that has joined still exists."""
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _byte_lock(index))
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _align(offset: int, to: int) -> int:
    return -(-offset // to) * to


def _total_bytes(size: int, slot_bytes: int) -> int:
    return _slots_at(size) + 2 * size * slot_bytes


def _slots_at(size: int) -> int:
    if not 2 <= size <= MAX_MEMBERS:
        raise ValueError(f"a segment has between 2 and {MAX_MEMBERS} members, not {size}")
    return _align(_align(_HEADER.size, 64) + size * CONTROL_WORDS * 8 + size * size * SEMAPHORE_BYTES, PAGE)


def _byte_lock(index: int) -> bytes:
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)
