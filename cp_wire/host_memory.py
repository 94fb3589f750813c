"""How many KV blocks a rank can hold in this host's memory: judged by the rank, and by a launcher before it starts any."""

from pathlib import Path

from cp_wire.errors import ConfigRefused
from cp_wire.pb import common_pb2
from cp_wire.words import counted

DEFAULT_POOL_BYTES = 1 << 30


class PoolRefused(ConfigRefused):
    """The requested pool can't be had; the message names the numbers."""


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that can be taken without swapping (MemAvailable); raises PoolRefused where the system does not say."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError as error:
        raise PoolRefused(f"{meminfo} can't be read ({error.strerror or error})") from error
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise PoolRefused(f"{meminfo} does not say MemAvailable")


def max_kv_blocks(
    config: common_pb2.ClusterConfig, bytes_per_block: int, available: int, ranks: int, default_bytes: int | None = None
) -> int:
    """Blocks for the pool: the configured tokens, else the configured bytes, else default_bytes.

    available: bytes that `ranks` ranks are about to share; default_bytes: min(1 GiB, available / 4 / ranks) unless given.
    Raises PoolRefused for a pool without a block, and for one that is larger than the share.
    """
    share = available // ranks
    if config.kv_cache_tokens_per_rank:
        blocks = config.kv_cache_tokens_per_rank // config.block_size
        asked = counted(config.kv_cache_tokens_per_rank, "token")
    else:
        usual = min(DEFAULT_POOL_BYTES, share // 4) if default_bytes is None else default_bytes
        wanted = config.kv_cache_memory_bytes or usual
        blocks = wanted // bytes_per_block
        asked = counted(wanted, "byte")
    if blocks < 1:
        raise PoolRefused(
            f"a KV pool of {asked} holds no block of {counted(config.block_size, 'token')} ({bytes_per_block} bytes): "
            "enlarge it or shrink the block"
        )
    if blocks * bytes_per_block > share:
        raise PoolRefused(
            f"a KV pool of {counted(blocks, 'block')} needs {blocks * bytes_per_block} bytes per rank, "
            f"{share} are available to each rank (of {ranks} on this host)"
        )
    return blocks
