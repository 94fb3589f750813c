"""Shape facts from a Hugging Face config.json; everything this project would compute wrongly is refused by name."""

from pathlib import Path
from typing import Any

from cp_layout.model_shape import ModelShape
from model_files.errors import ModelRefused
from model_files.families import ALL_FAMILIES, MLA_FAMILIES, Family
from model_files.fields import Fields
from model_files.hf_mla import mla_from_config, moe_from_config
from model_files.hf_rope import rope_from_config
from model_files.safetensors_index import STORED_DTYPES

_NEVER = (
    "quantization_config",
    "auto_map",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention_chunk_size",
    "clip_qkv",
)
"""Settings that no supported family computes."""


def shape_from_config(config: dict[str, Any], origin: Path, stored_dtype: str | None) -> ModelShape:
    """The shape that config.json describes; absent settings take the defaults that the family's configuration documents.

    `stored_dtype` stands in where the configuration names no dtype. `ModelRefused` names the setting that is missing,
    out of bounds or not supported.
    """
    fields = Fields(config, origin)
    family = _family(fields, origin)
    _refuse_other_mathematics(fields, family, origin)
    for name in family.must_state:
        fields.count(name)
    heads, hidden, layers = map(fields.count, ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    mla = moe = None
    if family.architecture in MLA_FAMILIES:
        mla = mla_from_config(fields, family, origin, heads)
        moe = moe_from_config(fields, family, layers)
        kv_heads, head_dim = 1, mla.qk_rope_head_dim
    else:
        kv_heads = fields.count("num_key_value_heads", heads)
        head_dim = head_dim_of(hidden, heads, kv_heads, fields.get("head_dim"), origin)
    max_position = fields.count("max_position_embeddings", 2048)
    rope_theta, rope_scaling = rope_from_config(fields, origin, max_position)
    return ModelShape(
        architecture=family.architecture,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.count("intermediate_size"),
        vocab_size=fields.count("vocab_size"),
        max_position=max_position,
        rms_norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=_dtype(fields, origin, stored_dtype),
        rope_scaling=rope_scaling,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        mla=mla,
        moe=moe,
    )


def head_dim_of(hidden: int, heads: int, kv_heads: int, stated: Any, origin: Path) -> int:
    """Columns of one head: as stated, else hidden/heads; `ModelRefused` when the head counts do not divide."""
    if heads % kv_heads:
        raise ModelRefused(f"{origin}: {heads} attention heads are not a multiple of {kv_heads} key-value heads")
    if stated is None and hidden % heads:
        raise ModelRefused(f"{origin}: hidden size {hidden} is not a multiple of {heads} attention heads")
    head_dim = Fields({"head_dim": stated}, origin).count("head_dim", hidden // heads)
    if head_dim % 2:
        raise ModelRefused(f"{origin}: head_dim = {head_dim} is odd, rotary positions need pairs")
    return head_dim


def _family(fields: Fields, origin: Path) -> Family:
    """The family that `architectures` and `model_type` agree on; either may be absent, a Llama needs neither."""
    architectures, model_type = fields.get("architectures"), fields.get("model_type")
    for family in ALL_FAMILIES.values():
        if architectures in (None, [family.architecture]) and model_type in (None, family.model_type):
            return family
    named = ", ".join(map(str, architectures)) if isinstance(architectures, list) else str(architectures)
    raise ModelRefused(
        f"{origin}: architecture {named} (model_type {model_type}) is not supported, only {', '.join(ALL_FAMILIES)}"
    )


def _refuse_other_mathematics(fields: Fields, family: Family, origin: Path) -> None:
    for name in _NEVER:
        fields.only(name)
    fields.only("attention_bias", family.qkv_bias)
    fields.only("mlp_bias", False)
    experts = ("num_local_experts", "num_experts", "n_routed_experts")
    for name in experts if family.architecture not in MLA_FAMILIES else experts[:-1]:
        fields.only(name, 0)
    fields.only("hidden_act", "silu")
    fields.only("use_sliding_window", False)
    if not family.window_has_switch:
        fields.only("sliding_window")
    if family.window_unless_null is not None and not fields.states("sliding_window"):
        raise ModelRefused(
            f"{origin}: sliding_window is absent, which means {family.window_unless_null} in a {family.architecture} model; "
            "only null is supported"
        )
    layer_types = fields.get("layer_types", [])
    for kind in layer_types if isinstance(layer_types, list) else [layer_types]:
        if kind != "full_attention":
            raise ModelRefused(f"{origin}: layer_types has {kind!r}, which is not supported, only 'full_attention'")


def _dtype(fields: Fields, origin: Path, stored_dtype: str | None) -> str:
    named = fields.get("dtype", fields.get("torch_dtype", stored_dtype))
    dtype = str(named).removeprefix("torch.")
    known = [name for name, _ in STORED_DTYPES.values()]
    if dtype not in known:
        raise ModelRefused(f"{origin}: dtype {named!r} is not supported, only {', '.join(known)}")
    return dtype
