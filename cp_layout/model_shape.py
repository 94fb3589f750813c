"""Shape facts of a model: the numbers that laws, capacity and KV bytes depend on."""

from dataclasses import dataclass

from cp_layout.cuts import kv_head_cut
from cp_layout.errors import LayoutError

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float16": 2}
"""Bytes per element of the dtypes that a rank computes in and keeps its cache in."""


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Slow rotations divided by `factor`, fast ones kept, those between blended.

    A rotation is slow when its wavelength exceeds original_max_position / low_freq_factor tokens, fast when it is below
    original_max_position / high_freq_factor.
    """

    factor: float
    original_max_position: int
    low_freq_factor: float
    high_freq_factor: float


@dataclass(frozen=True, slots=True)
class YarnRope:
    """Rotations slower than `beta_slow` turns in the original context divided by `factor`, those faster than `beta_fast`
    turns kept, a ramp over the dimensions between; cos and sin are multiplied by `attention_factor`."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool
    """Whether the ramp begins and ends at whole dimensions."""


RopeScaling = LinearRope | Llama3Rope | YarnRope
"""How rotary frequencies are stretched beyond the context of the first training."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention, rotary positions and a gated FFN: Llama and its relatives."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    tie_embeddings: bool
    dtype: str
    """Checkpoint's dtype, bfloat16 for GGUF; a checkpoint may have one that is not in DTYPE_BYTES."""
    rope_scaling: RopeScaling | None = None
    """None: plain rotary positions."""
    qkv_bias: bool = False
    """Whether the query, key and value projections add a bias."""
    qk_norm: bool = False
    """Whether every query and key head is RMS-normalised over its dimensions before it is rotated."""

    def kv_bytes_per_token(self, tp: int, dtype: str) -> int:
        """Bytes of K and V that one rank stores per token it owns, over all layers: 2·layers·heads(rank)·head_dim·e.

        dtype: of the cache; `LayoutError` when it is not one of DTYPE_BYTES.
        """
        if dtype not in DTYPE_BYTES:
            raise LayoutError(f"a KV cache of dtype {dtype!r} is not known, only {', '.join(sorted(DTYPE_BYTES))}")
        first, last = kv_head_cut(self.num_kv_heads, tp, 0)
        return 2 * self.num_layers * (last - first) * self.head_dim * DTYPE_BYTES[dtype]
