"""How many blocks a rank offers."""

from pathlib import Path

import pytest

from cp_wire.host_memory import DEFAULT_POOL_BYTES, PoolRefused, available_bytes, max_kv_blocks
from cp_wire.pb import common_pb2

GIB = 1 << 30


def blocks(available: int = 64 * GIB, ranks: int = 2, bytes_per_block: int = 4096, **fields: int) -> int:
    return max_kv_blocks(common_pb2.ClusterConfig(block_size=16, **fields), bytes_per_block, available, ranks)


def test_configured_tokens_come_first_then_bytes_then_the_default():
    assert blocks(kv_cache_tokens_per_rank=16 * 5 + 15, kv_cache_memory_bytes=1 << 20) == 5
    assert blocks(kv_cache_memory_bytes=1 << 20) == 256
    assert blocks() == DEFAULT_POOL_BYTES // 4096
    assert blocks(available=GIB) == GIB // 2 // 4 // 4096


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_cache_tokens_per_rank": 15}, "15 tokens holds no block of 16 tokens"),
        ({"kv_cache_memory_bytes": 4095}, "4095 bytes holds no block"),
        ({"kv_cache_memory_bytes": 33 * GIB}, r"are available to each rank \(of 2 on this host\)"),
    ],
)
def test_impossible_pools_are_refused_with_their_numbers(fields, words):
    with pytest.raises(PoolRefused, match=words):
        blocks(**fields)


def test_available_memory_is_read_from_meminfo(tmp_path: Path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 10 kB\nMemAvailable:   3 kB\n")
    assert available_bytes(meminfo) == 3072
    meminfo.write_text("MemTotal: 10 kB\n")
    with pytest.raises(PoolRefused, match="MemAvailable"):
        available_bytes(meminfo)
    with pytest.raises(PoolRefused, match=r"absent can't be read \(No such file or directory\)"):
        available_bytes(tmp_path / "absent")
