"""The tensors a checkpoint must hold, under their Hugging Face names, and the digest that identifies a checkpoint."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cp_layout.model_shape import ModelShape
from model_files.errors import ModelRefused

_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Derived from the configuration; old exporters stored it."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies."""

    name: str
    """Canonical Hugging Face name."""
    shape: tuple[int, ...]
    """(rows, columns) in Hugging Face order, or (elements,)."""
    dtype: str
    """As stored: F32, BF16, … in safetensors; F32, Q4_1, … in GGUF."""
    file: Path
    source_name: str
    """Name inside the file."""


def expected_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor that a checkpoint of this shape must hold."""
    hidden = shape.hidden_size
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        attention = _grouped_query if shape.mla is None else _latent
        expected[prefix + "input_layernorm.weight"] = (hidden,)
        expected |= {f"{prefix}self_attn.{name}": dims for name, dims in attention(shape).items()}
        expected[prefix + "self_attn.o_proj.weight"] = (hidden, shape.num_heads * shape.value_head_dim)
        expected[prefix + "post_attention_layernorm.weight"] = (hidden,)
        ffn = _experts(shape) if shape.is_mixture(layer) else _ffn(hidden, shape.intermediate_size)
        expected |= {f"{prefix}mlp.{name}": dims for name, dims in ffn.items()}
    expected["model.norm.weight"] = (hidden,)
    if not shape.tie_embeddings:
        expected["lm_head.weight"] = (shape.vocab_size, hidden)
    return expected


def _grouped_query(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden = shape.hidden_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    expected: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
    }
    if shape.qkv_bias:
        expected |= {"q_proj.bias": (queries,), "k_proj.bias": (keys,), "v_proj.bias": (keys,)}
    if shape.qk_norm:
        expected |= {"q_norm.weight": (shape.head_dim,), "k_norm.weight": (shape.head_dim,)}
    return expected


def _latent(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    mla, hidden = shape.mla, shape.hidden_size
    assert mla is not None
    queries, rank = shape.num_heads * mla.qk_head_dim, mla.q_lora_rank
    expected: dict[str, tuple[int, ...]] = (
        {"q_proj.weight": (queries, hidden)}
        if rank is None
        else {"q_a_proj.weight": (rank, hidden), "q_a_layernorm.weight": (rank,), "q_b_proj.weight": (queries, rank)}
    )
    return expected | {
        "kv_a_proj_with_mqa.weight": (mla.latent_dim, hidden),
        "kv_a_layernorm.weight": (mla.kv_lora_rank,),
        "kv_b_proj.weight": (shape.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
    }


def _ffn(hidden: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {
        "gate_proj.weight": (columns, hidden),
        "up_proj.weight": (columns, hidden),
        "down_proj.weight": (hidden, columns),
    }


def _experts(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    moe, hidden = shape.moe, shape.hidden_size
    assert moe is not None
    expected: dict[str, tuple[int, ...]] = {"gate.weight": (moe.num_experts, hidden)}
    if moe.topk_method == "noaux_tc":
        expected["gate.e_score_correction_bias"] = (moe.num_experts,)
    for expert in range(moe.num_experts):
        expected |= {f"experts.{expert}.{name}": dims for name, dims in _ffn(hidden, moe.intermediate_size).items()}
    return expected | {f"shared_experts.{name}": dims for name, dims in _ffn(hidden, moe.shared_size).items()}


def select_tensors(found: Iterable[TensorInfo], shape: ModelShape, origin: Path) -> dict[str, TensorInfo]:
    """The expected tensors among those found, in the order of `expected_tensors`.

    `ModelRefused` when one is missing, has another shape, or when the checkpoint holds a weight that would be left out of
    the computation. A head stored beside a tied embedding is not an error: it is the embedding.
    """
    by_name = {tensor.name: tensor for tensor in found}
    # Before the expectation is spelled out: the numbers come from a file and may be anything.
    if shape.num_layers > len(by_name):
        raise ModelRefused(f"{origin}: {len(by_name)} tensors can't make up {shape.num_layers} layers")
    if shape.moe is not None and shape.moe.num_experts > len(by_name):
        raise ModelRefused(f"{origin}: {len(by_name)} tensors can't make up {shape.moe.num_experts} experts")
    expected = expected_tensors(shape)
    for name, dims in expected.items():
        tensor = by_name.get(name)
        if tensor is None:
            raise ModelRefused(f"{origin}: tensor {name} of shape {list(dims)} is missing")
        if tensor.shape != dims:
            raise ModelRefused(f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, the model needs {list(dims)}")
    for name, tensor in by_name.items():
        if name not in expected and name != "lm_head.weight" and not _IGNORED.fullmatch(name):
            raise ModelRefused(
                f"{tensor.file}: tensor {name} is not part of a {shape.architecture} model of {shape.num_layers} layers"
            )
    return {name: by_name[name] for name in expected}


def checkpoint_hash(shape: ModelShape, tensors: Mapping[str, TensorInfo]) -> str:
    """SHA-256 (hex) over the shape facts and the sorted (name, shape, dtype) of all tensors; independent of paths."""
    index = sorted((tensor.name, list(tensor.shape), tensor.dtype) for tensor in tensors.values())
    document = json.dumps({"shape": asdict(shape), "tensors": index}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(document.encode()).hexdigest()
