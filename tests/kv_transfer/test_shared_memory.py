"""A pool that is read by another process: who may open what, and what is left when its owner is killed."""

import asyncio
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from cp_wire.errors import ConfigRefused
from cp_wire.pb import kv_transfer_pb2 as pb
from kv_transfer.open_pools import OpenPools
from kv_transfer.shared_memory import PAGE, SharedPool, open_pool

OWNER = """
import sys
from kv_transfer.shared_memory import SharedPool
pool = SharedPool(8 << 20)
pool.data[:] = 5
print(pool.message().SerializeToString().hex(), flush=True)
sys.stdin.read()
"""


def changed(message: pb.SharedPool, **fields: object) -> pb.SharedPool:
    other = pb.SharedPool()
    other.CopyFrom(message)
    other.MergeFrom(pb.SharedPool(**fields))  # type: ignore[arg-type]
    return other


def test_a_reader_sees_what_the_owner_writes_and_cannot_write() -> None:
    pool = SharedPool(10_000)
    message = pool.message()
    view = open_pool(message, 10_000).data
    assert len(view) == 10_000 and not view.any()
    pool.data[17] = 9
    assert view[17] == 9
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    pool.close()
    pool.close()
    pool.data[18] = 8
    assert view[18] == 8
    with pytest.raises(ConfigRefused):
        open_pool(message, 10_000)


def test_only_the_pool_that_was_described_is_opened() -> None:
    pool = SharedPool(100)
    message = pool.message()
    with pytest.raises(ConfigRefused, match="not the KV pool that was described"):
        open_pool(changed(message, key=b"0123456789abcdef"), 100)
    with pytest.raises(ConfigRefused, match="not the KV pool that was described"):
        open_pool(message, 101)
    with tempfile.TemporaryFile() as other, pytest.raises(ConfigRefused, match="is no KV pool"):
        open_pool(changed(message, fd=other.fileno()), 100)
    with pytest.raises(ConfigRefused, match="cannot be opened"):
        open_pool(changed(message, fd=99_999), 100)
    unsealed = os.memfd_create("kvloom-kv")
    try:
        os.pwrite(unsealed, b"kvloomKV" + message.key + bytes(PAGE - 24 + 100), 0)
        with pytest.raises(ConfigRefused, match="not the KV pool that was described"):
            open_pool(changed(message, fd=unsealed), 100)
    finally:
        os.close(unsealed)
    pool.close()


def test_it_cannot_shrink_under_a_reader() -> None:
    pool = SharedPool(100)
    with pytest.raises(PermissionError):
        os.ftruncate(pool.message().fd, 10)
    pool.close()


def mappings() -> int:
    """Shared pools that this process maps."""
    return sum(1 for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:kvloom-kv" in line)


async def test_a_mapping_is_kept_for_as_long_as_its_owner_lives() -> None:
    command = [sys.executable, "-c", OWNER]
    pools, before = OpenPools(watch_s=0.01), mappings()
    pipe = asyncio.subprocess.PIPE
    owner = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        assert owner.stdout is not None
        line = await asyncio.wait_for(owner.stdout.readline(), 30)
        message = pb.SharedPool.FromString(bytes.fromhex(line.decode()))
        first = pools.get(message, 8 << 20)
        assert pools.get(message, 8 << 20) is first and first[-1] == 5
        with pytest.raises(ConfigRefused):
            pools.get(message, 9 << 20)
        del first
        assert (len(pools), mappings()) == (1, before + 1)
        owner.kill()
        await owner.wait()
        assert pools._watching is not None
        await asyncio.wait_for(pools._watching, 30)
        assert (len(pools), mappings()) == (0, before)
    finally:
        if owner.returncode is None:
            owner.kill()
        await owner.wait()
        await pools.close()


async def test_an_owner_that_goes_while_its_pool_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, pools = SharedPool(100), OpenPools(watch_s=0.01)
    message, map_it = pool.message(), mmap.mmap

    def late(*args: int) -> mmap.mmap:
        mapped = map_it(*args)
        pool.close()
        return mapped

    monkeypatch.setattr(mmap, "mmap", late)
    assert len(pools.get(message, 100)) == 100
    assert pools._watching is not None
    await asyncio.wait_for(pools._watching, 30)
    assert len(pools) == 0


async def test_closing_lets_go_of_everything() -> None:
    pool, pools = SharedPool(100), OpenPools()
    pools.get(pool.message(), 100)
    await pools.close()
    assert len(pools) == 0
    pool.close()


def test_nothing_is_left_of_a_killed_owner() -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        message = pb.SharedPool.FromString(bytes.fromhex(owner.stdout.readline()))
        before = mappings()
        view = open_pool(message, 8 << 20).data
        owner.send_signal(signal.SIGKILL)
        owner.wait(30)
        assert (view == np.uint8(5)).all()
        with pytest.raises(ConfigRefused, match="cannot be opened"):
            open_pool(message, 8 << 20)
        assert mappings() == before + 1
        del view
        assert mappings() == before
    assert not list(Path("/dev/shm").glob("*kvloom-kv*"))
