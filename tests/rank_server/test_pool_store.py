"""The pool's bytes for transfers, in host memory and, through staged copies, on a device."""

import numpy as np
import pytest
import torch

from kv_transfer.shared_memory import SharedPool, open_pool
from kv_transfer.store import pick
from rank_server import pool_store
from rank_server.kv_pool import KvPool
from rank_server.pool_store import DeviceStore, HostStore, memory_to_share, store_of

SIZES = {"num_layers": 2, "num_blocks": 3, "block_size": 4, "num_kv_heads": 4, "head_dim": 5, "device": "cpu"}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def filled(dtype: torch.dtype = torch.bfloat16, device: str = "cpu", **changes: object) -> KvPool:
    pool = KvPool(**SIZES | {"dtype": dtype, "device": device} | changes)  # type: ignore[arg-type]
    pool._data.copy_(torch.randn(pool._data.shape, generator=torch.Generator().manual_seed(1)))
    return pool


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_place_is_a_row_of_a_plane(dtype: torch.dtype, rows: int) -> None:
    """Plane after plane: K of layer 0, V of layer 0, K of layer 1, …; of latents, one per layer."""
    pool = filled(dtype, rows=rows)
    store = store_of(pool)
    assert isinstance(store, HostStore)
    assert store.geometry.shape == (2 * rows, 3, 4, 4, 5 * dtype.itemsize)
    out = np.empty(2 * rows * 2 * 5 * dtype.itemsize, np.uint8)
    store.read(pick(store.geometry, np.array([7]), 1, 2), range(2 * rows), out)
    for layer in range(2):
        for row in range(rows):
            found = out.reshape(2, rows, -1)[layer, row]
            wanted = pool._data[layer, row, 1, 3, 1:3].contiguous().view(torch.uint8).numpy()
            np.testing.assert_array_equal(found, wanted.reshape(-1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("first", "num"), [(0, 4), (1, 2), (2, 1), (3, 1)])
def test_staged_copies_are_the_same_as_the_host_s(device: str, first: int, num: int) -> None:
    host, other = filled(), filled(device=device)
    staged, straight = DeviceStore(other), HostStore(host)
    assert staged.geometry == straight.geometry and staged.shared is None
    chooser = np.random.default_rng(3)
    for count in (1, 12, 7):
        picked = pick(straight.geometry, chooser.permutation(12)[:count], first, num)
        part = range(1, straight.geometry.planes * count)
        read = [np.empty(len(part) * num * 10, np.uint8) for _ in range(2)]
        for store, out in zip((staged, straight), read, strict=True):
            store.fence()
            store.read(picked, part, out)
        np.testing.assert_array_equal(*read)
        rows = chooser.integers(0, 256, read[0].shape, np.uint8)
        rows.flags.writeable = False  # as a message's payload is
        for store in (staged, straight):
            store.write(picked, part, rows)
        assert torch.equal(other.as_bytes().cpu(), host.as_bytes())
        source = HostStore(filled())
        there = pick(source.geometry, chooser.permutation(12)[:count], first, num)
        for store in (staged, straight):
            store.copy(picked, part, source, there)
        assert torch.equal(other.as_bytes().cpu(), host.as_bytes())


def test_a_shared_pool_is_read_where_it_lies() -> None:
    size = filled().as_bytes().numel()
    shared = memory_to_share(size)
    assert shared is not None
    pool = KvPool(**SIZES, dtype=torch.bfloat16, memory=torch.from_numpy(shared.data))  # type: ignore[arg-type]
    assert not pool._data.any()
    pool.write(1, torch.randn(1, 4, 5), torch.randn(1, 4, 5), torch.tensor([11]))
    store = store_of(pool, shared)
    assert store.shared is shared
    np.testing.assert_array_equal(open_pool(shared.message(), size).data, pool.as_bytes().flatten().numpy())
    shared.close()
    with pytest.raises(ValueError, match=f"memory of {size - 1} bytes for a KV pool of {size}"):
        filled(memory=torch.zeros(size - 1, dtype=torch.uint8))


def test_a_system_without_such_memory_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(size: int) -> SharedPool:
        raise OSError("no such memory")

    monkeypatch.setattr(pool_store, "SharedPool", none)
    assert memory_to_share(100) is None
