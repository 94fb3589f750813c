"""Shape facts from a Hugging Face config.json; everything this project would compute wrongly is refused by name."""

from pathlib import Path
from typing import Any

from cp_layout.model_shape import DTYPE_BYTES, ModelShape
from model_files.errors import ModelRefused
from model_files.fields import Fields

ARCHITECTURE = "LlamaForCausalLM"


def shape_from_config(config: dict[str, Any], origin: Path, stored_dtype: str | None) -> ModelShape:
    """The shape that config.json describes; absent settings take the defaults that the Llama configuration documents.

    `stored_dtype` stands in where the configuration names no dtype. `ModelRefused` names the setting that is missing,
    out of bounds or not supported.
    """
    fields = Fields(config, origin)
    _refuse_other_architectures(fields, origin)
    for name in ("sliding_window", "quantization_config", "auto_map"):
        fields.only(name)
    for name in ("attention_bias", "mlp_bias"):
        fields.only(name, False)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        fields.only(name, 0)
    fields.only("hidden_act", "silu")
    heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    kv_heads = fields.count("num_key_value_heads", heads)
    head_dim = head_dim_of(hidden, heads, kv_heads, fields.get("head_dim"), origin)
    return ModelShape(
        architecture=ARCHITECTURE,
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.count("intermediate_size"),
        vocab_size=fields.count("vocab_size"),
        max_position=fields.count("max_position_embeddings", 2048),
        rms_norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(fields, origin),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=_dtype(fields, origin, stored_dtype),
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


def _refuse_other_architectures(fields: Fields, origin: Path) -> None:
    architectures = fields.get("architectures", [ARCHITECTURE])
    model_type = fields.get("model_type", "llama")
    if architectures != [ARCHITECTURE] or model_type != "llama":
        named = ", ".join(map(str, architectures)) if isinstance(architectures, list) else str(architectures)
        raise ModelRefused(f"{origin}: architecture {named} (model_type {model_type}) is not supported, only {ARCHITECTURE}")


def _rope_theta(fields: Fields, origin: Path) -> float:
    """Rotary base, from `rope_parameters` where the file has it, else from `rope_theta` beside `rope_scaling`."""
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    rope = fields.get(name, {})
    if not isinstance(rope, dict):
        raise ModelRefused(f"{origin}: {name} = {rope!r} is not an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelRefused(f"{origin}: {name} of type {kind!r} is not supported, only 'default'")
    for settings in (fields, Fields(rope, origin)):
        settings.only("partial_rotary_factor", 1)
    return Fields(rope, origin).real("rope_theta", fields.real("rope_theta", 10000.0))


def _dtype(fields: Fields, origin: Path, stored_dtype: str | None) -> str:
    named = fields.get("dtype", fields.get("torch_dtype", stored_dtype))
    dtype = str(named).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ModelRefused(f"{origin}: dtype {named!r} is not supported, only {', '.join(DTYPE_BYTES)}")
    return dtype
