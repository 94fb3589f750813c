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
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        expected |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
        }
        if shape.qkv_bias:
            expected |= {
                prefix + "self_attn.q_proj.bias": (queries,),
                prefix + "self_attn.k_proj.bias": (keys,),
                prefix + "self_attn.v_proj.bias": (keys,),
            }
        if shape.qk_norm:
            expected |= {
                prefix + "self_attn.q_norm.weight": (shape.head_dim,),
                prefix + "self_attn.k_norm.weight": (shape.head_dim,),
            }
        expected |= {
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (ffn, hidden),
            prefix + "mlp.up_proj.weight": (ffn, hidden),
            prefix + "mlp.down_proj.weight": (hidden, ffn),
        }
    expected["model.norm.weight"] = (hidden,)
    if not shape.tie_embeddings:
        expected["lm_head.weight"] = (shape.vocab_size, hidden)
    return expected


def select_tensors(found: Iterable[TensorInfo], shape: ModelShape, origin: Path) -> dict[str, TensorInfo]:
    """The expected tensors among those found, in the order of `expected_tensors`.

    `ModelRefused` when one is missing, has another shape, or when the checkpoint holds a weight that would be left out of
    the computation. A head stored beside a tied embedding is not an error: it is the embedding.
    """
    by_name = {tensor.name: tensor for tensor in found}
    if shape.num_layers > len(by_name):
        # Before the expectation is spelled out: the number comes from a file and may be anything.
        raise ModelRefused(f"{origin}: {len(by_name)} tensors can't make up {shape.num_layers} layers")
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
