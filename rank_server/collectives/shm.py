"""Groups of members on one host that exchange through shared memory: who makes their memory, and who opens it."""

import os
from collections.abc import Sequence

from rank_server.collectives.base import CollectiveError, Group
from rank_server.collectives.shm_group import ShmGroup
from rank_server.collectives.shm_segment import Segment
from rank_server.collectives.shm_semaphore import Semaphores
from rank_server.collectives.solo import SoloGroup

SLOT_BYTES = 4 * 1024 * 1024
"""Largest piece of a tensor that one round moves. Memory is taken when a slot is first used that far."""


class ShmBackend:
    """`Backend` of one process. Raises CollectiveError on a system without anonymous files or shared semaphores."""

    def __init__(self, slot_bytes: int = SLOT_BYTES, compiled: bool = True) -> None:
        if not hasattr(os, "memfd_create"):
            raise CollectiveError("shm collectives need memfd_create, which this system lacks")
        try:
            self._semaphores = Semaphores()
        except OSError as error:
            raise CollectiveError(f"shm collectives can't be used: {error}") from error
        self._slot_bytes, self._compiled = slot_bytes, compiled
        self._prepared: dict[str, tuple[bytes, Segment]] = {}

    def prepare(self, name: str, ranks: Sequence[int]) -> bytes:
        """See `Backend`; the bootstrap bytes name a descriptor of this process and the key of what it refers to."""
        if len(ranks) == 1:
            return b""
        try:
            segment, bootstrap = Segment.create(len(ranks), self._slot_bytes, self._semaphores)
        except (OSError, ValueError) as error:
            raise CollectiveError(f"group {name}: no shared memory: {error}") from error
        self._prepared[name] = (bootstrap, segment)
        return bootstrap

    def open(self, name: str, ranks: Sequence[int], rank: int, bootstrap: bytes, timeout_s: float) -> Group:
        """See `Backend`."""
        if len(ranks) == 1:
            return SoloGroup(name)
        index = list(ranks).index(rank)
        try:
            segment = self._segment(name, index, len(ranks), bootstrap)
            segment.join(index)
        except (OSError, ValueError) as error:
            raise CollectiveError(f"group {name}, member {index} of {len(ranks)}: open failed: {error}") from error
        group = ShmGroup(name, len(ranks), index, timeout_s, segment, self._compiled)
        group.barrier()
        group.calls = 0
        return group

    def _segment(self, name: str, index: int, size: int, bootstrap: bytes) -> Segment:
        if index > 0:
            return Segment.open(bootstrap, size, self._semaphores)
        prepared, segment = self._prepared.pop(name, (b"", None))
        if segment is None or prepared != bootstrap:
            raise ValueError(f"nothing was prepared under {bootstrap!r}")
        return segment
