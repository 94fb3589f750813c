"""The one table of model families: what each adds to the common decoder, and what its files leave unsaid."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. All share rotary positions, RMS norms and a SiLU-gated FFN."""

    architecture: str
    """Name in config.json."""
    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    must_state: tuple[str, ...] = ()
    """Settings whose default in the family's configuration class is the size of one particular model."""
    window_unless_null: int | None = None
    """Tokens of the sliding window that an absent `sliding_window` stands for."""
    window_has_switch: bool = False
    """Whether `sliding_window` counts only where `use_sliding_window` is true."""
    gguf: str | None = None
    """`general.architecture` of its GGUF files; None: they come as another family's."""
    gguf_pairs_rows: bool = False
    """Whether GGUF keeps the two rows of a rotary pair of q and k side by side."""


_SIZES = ("num_key_value_heads", "max_position_embeddings")

FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", "llama", gguf="llama", gguf_pairs_rows=True),
        Family("MistralForCausalLM", "mistral", must_state=_SIZES, window_unless_null=4096),
        Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True, must_state=_SIZES, window_has_switch=True, gguf="qwen2"),
        Family(
            "Qwen3ForCausalLM", "qwen3", qk_norm=True, must_state=(*_SIZES, "head_dim"), window_has_switch=True, gguf="qwen3"
        ),
    )
}
"""Those with grouped-query attention, by architecture name."""

_LATENT_SIZES = (
    "max_position_embeddings",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)

MLA_FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        Family("DeepseekV2ForCausalLM", "deepseek_v2", must_state=_LATENT_SIZES),
        Family("DeepseekV3ForCausalLM", "deepseek_v3", must_state=_LATENT_SIZES),
    )
}
"""Those with latent attention and, mostly, experts."""

ALL_FAMILIES: Mapping[str, Family] = {**FAMILIES, **MLA_FAMILIES}

GGUF_FAMILIES: Mapping[str, Family] = {family.gguf: family for family in FAMILIES.values() if family.gguf is not None}
"""By `general.architecture`. Mistral's files call themselves llama."""
