"""Shape facts of a model: the numbers that laws, capacity and KV bytes depend on."""

from dataclasses import dataclass
from typing import Literal

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
class MlaShape:
    """Multi-head latent attention: keys and values of all heads are linear in one latent row per token.

    A query or key head is [qk_nope_head_dim ‖ qk_rope_head_dim], of which only the second part is rotated; the rotated part
    of the key is the same for all heads.
    """

    q_lora_rank: int | None
    """Width that queries pass through; None: they are projected at once."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True
    """Whether the two elements of a rotary pair lie side by side."""
    score_factor: float = 1.0
    """Multiplies (qk_nope_head_dim + qk_rope_head_dim)^−½ in the scores."""

    @property
    def latent_dim(self) -> int:
        """Elements of the one row that is stored per token: the compressed KV and the rotated part of the key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Elements of a query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


TopkMethod = Literal["greedy", "group_limited_greedy", "noaux_tc"]
"""How a router picks experts: softmax scores, all experts; softmax scores, the groups with the highest score; sigmoid scores,
the groups whose two highest biased scores have the highest sum, weights unbiased."""


@dataclass(frozen=True, slots=True)
class MoeShape:
    """A mixture of experts in place of the FFN: a token goes through those a router picks and the shared ones."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Columns of one expert."""
    num_shared_experts: int
    first_dense_layers: int
    """Layers before the first mixture; theirs is a plain FFN."""
    topk_method: TopkMethod
    num_groups: int = 1
    groups_per_token: int = 1
    normalise: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    scaling_factor: float = 1.0

    @property
    def shared_size(self) -> int:
        """Columns of the shared experts together."""
        return self.num_shared_experts * self.intermediate_size


@dataclass(frozen=True, slots=True)
class KvSpec:
    """What one rank stores of a token in a layer: `rows` rows of `heads` × `width` elements."""

    rows: int
    """2: keys and values; 1: a latent, which is both."""
    heads: int
    width: int

    @property
    def elements(self) -> int:
        """Elements per token and layer."""
        return self.rows * self.heads * self.width


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with rotary positions and a gated FFN.

    Attention is grouped-query, as in Llama and its relatives, or latent (`mla`); then there is one KV head, the latent, and
    `head_dim` is the width of what is rotated.
    """

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

    mla: MlaShape | None = None
    moe: MoeShape | None = None

    @property
    def query_head_dim(self) -> int:
        """Elements of a projected query head."""
        return self.head_dim if self.mla is None else self.mla.qk_head_dim

    @property
    def value_head_dim(self) -> int:
        """Elements of a head of the attention's output."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim

    @property
    def score_scale(self) -> float:
        """What dot products of queries and keys are multiplied by."""
        factor = 1.0 if self.mla is None else self.mla.score_factor
        return self.query_head_dim**-0.5 * factor

    def is_mixture(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.moe is not None and layer >= self.moe.first_dense_layers

    def kv_spec(self, tp: int) -> KvSpec:
        """What every TP member stores of a token it owns."""
        if self.mla is not None:
            return KvSpec(1, 1, self.mla.latent_dim)
        first, last = kv_head_cut(self.num_kv_heads, tp, 0)
        return KvSpec(2, last - first, self.head_dim)

    def kv_bytes_per_token(self, tp: int, dtype: str) -> int:
        """Bytes that one rank stores per token it owns, over all layers: of K and V, or of the latent.

        dtype: of the cache; `LayoutError` when it is not one of DTYPE_BYTES.
        """
        if dtype not in DTYPE_BYTES:
            raise LayoutError(f"a KV cache of dtype {dtype!r} is not known, only {', '.join(sorted(DTYPE_BYTES))}")
        return self.num_layers * self.kv_spec(tp).elements * DTYPE_BYTES[dtype]
