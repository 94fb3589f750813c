"""The effective configuration: what was asked for, completed and adjusted once, from what the model's shape says.

The coordinator settles it for its ranks; a launcher settles it too, to refuse before it starts a process.
"""

from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.laws import check_config
from cp_layout.model_shape import DTYPE_BYTES, ModelShape
from cp_wire.errors import ConfigRefused
from cp_wire.identity import PROTOCOL_VERSION
from cp_wire.pb import common_pb2

AUTO_DEVICE = "cpu"
"""What every host has. A launcher that finds GPUs where its ranks will run asks for cuda by name."""

AUTO_COLLECTIVES = {"cpu": "gloo", "cuda": "nccl"}
"""By device, what works wherever the ranks are. A launcher that puts all of them on one host asks for shm by name."""


def grid_of(config: common_pb2.ClusterConfig) -> Grid:
    """The rank grid; raises LayoutError."""
    return Grid(tp=config.tp, pcp=config.pcp, dcp=config.dcp, dp=config.dp)


def layout_of(config: common_pb2.ClusterConfig) -> Layout:
    """The KV layout of every request; raises LayoutError."""
    return Layout(num_shards=config.dcp, interleave=config.interleave, block_size=config.block_size)


def settle(asked: common_pb2.ClusterConfig, shape: ModelShape) -> common_pb2.ClusterConfig:
    """Settles `auto` and absent values and checks the laws; raises LayoutError or ConfigRefused, naming the numbers.

    The model's name and hash are left as they are.
    """
    config = common_pb2.ClusterConfig()
    config.CopyFrom(asked)
    config.interleave = asked.interleave or asked.block_size
    config.dtype = shape.dtype if asked.dtype in ("", "auto") else asked.dtype
    config.kv_cache_dtype = config.dtype if asked.kv_cache_dtype in ("", "auto") else asked.kv_cache_dtype
    config.device = AUTO_DEVICE if asked.device in ("", "auto") else asked.device
    if config.device not in AUTO_COLLECTIVES:
        raise ConfigRefused(f"device {config.device} is not one of {', '.join(AUTO_COLLECTIVES)}")
    config.collectives = AUTO_COLLECTIVES[config.device] if asked.collectives in ("", "auto") else asked.collectives
    if (config.collectives == "nccl") != (config.device == "cuda"):
        raise ConfigRefused(f"collectives {config.collectives} can't exchange tensors of device {config.device}")
    config.max_model_len = asked.max_model_len or shape.max_position
    config.protocol_version = PROTOCOL_VERSION
    if config.max_model_len > shape.max_position:
        raise ConfigRefused(f"max_model_len {config.max_model_len} is beyond the model's {shape.max_position} positions")
    if config.max_model_len < 2:
        raise ConfigRefused(f"max_model_len {config.max_model_len} leaves no room for a prompt and an output: at least 2")
    config.pcp_gather = asked.pcp_gather or "auto"
    config.mla_gather = asked.mla_gather or "auto"
    for name in ("dtype", "kv_cache_dtype"):
        if getattr(config, name) not in DTYPE_BYTES:
            raise ConfigRefused(f"{name} {getattr(config, name)} is not one of {', '.join(DTYPE_BYTES)}")
    check_config(
        grid_of(config),
        layout_of(config),
        shape.num_heads,
        shape.num_kv_heads,
        mla=shape.mla is not None,
        q_replicate=config.q_replicate,
        pcp_gather=config.pcp_gather,
        mla_gather=config.mla_gather,
        kv_tokens_per_rank=config.kv_cache_tokens_per_rank or None,
    )
    return config
