"""The KV pool as what a transfer reads and writes: its bytes, wherever they lie."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from cp_wire.logs import get_logger
from kv_transfer.shared_memory import SharedPool
from kv_transfer.store import ArrayStore, Bytes, Geometry, Picked, Store, copy_by_buffer
from rank_server.kv_pool import KvPool

log = get_logger("transfer")


class PoolStore(Store, Protocol):
    """A store whose pool the worker thread computes on."""

    def fence(self) -> None:
        """What the worker has launched until now comes before all later reads and writes."""
        ...


class HostStore(ArrayStore):
    """A pool in host memory: reads and writes go straight to it."""

    def __init__(self, pool: KvPool, shared: SharedPool | None = None) -> None:
        super().__init__(pool.as_bytes().numpy(), shared)

    def fence(self) -> None:
        """On the host, what a step was to write is written before its answer is seen."""


class DeviceStore:
    """A pool in the memory of a device: rows are gathered there and cross over in one piece, through pinned memory.

    Belongs to one thread. On CUDA everything runs on a stream of its own, beside the worker's.
    """

    def __init__(self, pool: KvPool) -> None:
        data = pool.as_bytes()
        self._geometry = Geometry(*data.shape)
        self._data = data.view(-1)
        self._stream = torch.cuda.Stream(device=data.device) if data.is_cuda else None
        self._pinned = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def geometry(self) -> Geometry:
        """Sizes of the pool."""
        return self._geometry

    @property
    def shared(self) -> SharedPool | None:
        """No other process reads a device's memory."""
        return None

    def fence(self) -> None:
        """A rank may have answered a step whose kernels still run."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._data.device))

    def read(self, picked: Picked, rows: range, out: Bytes) -> None:
        """See `Store.read`."""
        index = torch.from_numpy(picked.units(rows))
        with self._own_stream():
            units = self._units(picked)[index.to(self._data.device)]
            staged = self._staging(units.numel())
            staged.copy_(units.flatten())
        out[:] = staged.numpy().reshape(out.shape)

    def write(self, picked: Picked, rows: range, data: Bytes) -> None:
        """See `Store.write`."""
        index = torch.from_numpy(picked.units(rows))
        staged = self._staging(data.size)
        staged.numpy()[:] = data.reshape(-1)
        with self._own_stream():
            moved = staged.to(self._data.device).view(len(index), picked.unit_bytes)
            self._units(picked)[index.to(self._data.device)] = moved

    def copy(self, picked: Picked, rows: range, source: ArrayStore, theirs: Picked) -> None:
        """See `Store.copy`."""
        copy_by_buffer(self, picked, rows, source, theirs)

    def _units(self, picked: Picked) -> Tensor:
        return self._data.view(-1, picked.unit_bytes)

    def _staging(self, size: int) -> Tensor:
        """[size] host memory that is overwritten by the next call's."""
        if len(self._pinned) < size:
            self._pinned = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._stream is not None)
        return self._pinned[:size]

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """What is launched inside is done afterwards."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def store_of(pool: KvPool, shared: SharedPool | None = None) -> PoolStore:
    """The store of a pool; shared: the memory it lies in, if others may read it there."""
    return HostStore(pool, shared) if pool.device.type == "cpu" else DeviceStore(pool)


def memory_to_share(size: int) -> SharedPool | None:
    """Memory for a pool of so many bytes that other processes of this host may read; None where the system has none."""
    try:
        return SharedPool(size)
    except OSError as error:
        log.warning("the KV pool cannot be shared with other processes of this host", why=str(error))
        return None
