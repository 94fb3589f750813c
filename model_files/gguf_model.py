"""A GGUF file, seen under Hugging Face names and row order."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from tokenizers import Tokenizer

from cp_layout.model_shape import ModelShape
from model_files.errors import ModelRefused
from model_files.families import FAMILIES, GGUF_FAMILIES
from model_files.fields import Fields
from model_files.gguf_header import GgufHeader, read_gguf_header
from model_files.gguf_tokenizer import adds_bos, build_tokenizer
from model_files.hf_config import head_dim_of
from model_files.hf_rope import DEFAULT_THETA
from model_files.model import ModelFiles
from model_files.tensors import TensorInfo, select_tensors

_WHOLE_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_ROTATED = (".q_proj.weight", ".k_proj.weight")
_ONLY: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scale_linear": (1,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0,),
    "attention.scale": (),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
}
"""Setting of the architecture → the values that leave the mathematics as it is computed here."""

_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True)
class GgufModel(ModelFiles):
    """Checkpoint in one GGUF file; quantised tensors are dequantised as they are read."""

    kind = "gguf"

    header: GgufHeader

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        fields = Fields(self.header.values, self.path)
        texts = {}
        for role, key in keys.items():
            token_id = fields.token_id(f"tokenizer.ggml.{key}_token_id", self.shape.vocab_size)
            text = None if token_id is None else self.header.element("tokenizer.ggml.tokens", token_id)
            if text is not None:
                texts[role] = text
        return texts

    @cached_property
    def add_bos(self) -> bool:
        return self.bos_token_id is not None and adds_bos(self.header)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return build_tokenizer(self.header, self.shape.vocab_size)

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def read_rows(self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> np.ndarray:
        tensor = self._checked_rows(name, start, stop, columns)
        if len(tensor.shape) == 1:
            return self._dequantised(tensor.source_name, 0, 1, None)[0, start:stop].copy()
        if not (FAMILIES[self.shape.architecture].gguf_pairs_rows and name.endswith(_ROTATED)):
            return self._dequantised(tensor.source_name, start, stop, columns)
        head_dim = self.shape.head_dim
        first, last = start // head_dim, -(-stop // head_dim)
        rows = rotate_half_order(self._dequantised(tensor.source_name, first * head_dim, last * head_dim, columns), head_dim)
        return rows[start - first * head_dim : stop - first * head_dim].copy()

    def _dequantised(self, source_name: str, start: int, stop: int, columns: tuple[int, int] | None) -> np.ndarray:
        """Rows as stored, [stop − start, columns] float32, owned by the caller; a vector is one row."""
        tensor = self.header.tensors[source_name]
        first, last = columns or (0, tensor.shape[-1])
        if start == stop or first == last:
            return np.empty((stop - start, last - first), np.float32)
        width = tensor.row_bytes
        raw = np.frombuffer(self.header.buffer, np.uint8, (stop - start) * width, tensor.begin + start * width)
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        first_block, last_block = first // block, -(-last // block)
        blocks = raw.reshape(stop - start, width)[:, first_block * block_bytes : last_block * block_bytes]
        rows = dequantize(np.ascontiguousarray(blocks), tensor.type)
        return np.array(rows[:, first - first_block * block : last - first_block * block], dtype=np.float32)


def rotate_half_order(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Undo the row order that GGUF keeps for q and k of some families: whole heads, [heads·head_dim, columns] → the same shape.

    GGUF puts the two numbers of a rotary pair side by side (rows 2i and 2i + 1 of a head); Hugging Face keeps them half
    a head apart (rows i and i + head_dim/2).
    """
    heads = rows.shape[0] // head_dim
    return rows.reshape(heads, head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def open_gguf(path: Path) -> GgufModel:
    """Open and check a file; `ModelRefused` when it is damaged or not a supported model."""
    header = read_gguf_header(path)
    shape = _shape(header)
    fields = Fields(header.values, path)
    for kind in {tensor.type for tensor in header.tensors.values()}:
        if not _can_dequantise(kind):
            raise ModelRefused(f"{path}: tensors of type {kind.name} are not supported")
    found = [
        TensorInfo(_canonical(tensor.name, path), tensor.shape, tensor.type.name, path, tensor.name)
        for tensor in header.tensors.values()
    ]
    stops = (fields.token_id(f"tokenizer.ggml.{key}", shape.vocab_size) for key in _STOP_KEYS)
    template = fields.get("tokenizer.chat_template")
    return GgufModel(
        path=path,
        name=str(fields.get("general.name", path.stem)),
        shape=shape,
        eos_token_ids=tuple(dict.fromkeys(stop for stop in stops if stop is not None)),
        bos_token_id=fields.token_id("tokenizer.ggml.bos_token_id", shape.vocab_size),
        chat_template=template if isinstance(template, str) else None,
        tensors=select_tensors(found, shape, path),
        header=header,
    )


def _shape(header: GgufHeader) -> ModelShape:
    path, general = header.path, Fields(header.values, header.path)
    named = general.get("general.architecture")
    if named not in GGUF_FAMILIES:
        raise ModelRefused(f"{path}: architecture {named!r} is not supported, only {', '.join(GGUF_FAMILIES)}")
    family = GGUF_FAMILIES[named]
    own = {key.removeprefix(f"{named}."): value for key, value in header.values.items() if key.startswith(f"{named}.")}
    fields = Fields(own, path, f"{named}.")
    for setting, harmless in _ONLY.items():
        fields.only(setting, *harmless)
    if "rope_freqs.weight" in header.tensors:
        raise ModelRefused(f"{path}: tensor rope_freqs.weight scales the rotary positions, which is not supported")
    hidden, heads = fields.count("embedding_length"), fields.count("attention.head_count")
    kv_heads = fields.count("attention.head_count_kv", heads)
    head_dim = head_dim_of(hidden, heads, kv_heads, fields.get("attention.key_length"), path)
    fields.only("attention.value_length", head_dim)
    fields.only("rope.dimension_count", head_dim)
    embedding = header.tensors.get("token_embd.weight")
    return ModelShape(
        architecture=family.architecture,
        num_layers=fields.count("block_count"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.count("feed_forward_length"),
        vocab_size=fields.count("vocab_size", embedding.shape[0] if embedding else None),
        max_position=fields.count("context_length"),
        rms_norm_eps=fields.real("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.real("rope.freq_base", DEFAULT_THETA),
        tie_embeddings="output.weight" not in header.tensors,
        dtype="bfloat16",
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )


def _canonical(source_name: str, path: Path) -> str:
    layer = _LAYER.fullmatch(source_name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    if source_name in _WHOLE_NAMES:
        return _WHOLE_NAMES[source_name]
    raise ModelRefused(f"{path}: tensor {source_name} is not part of a model of any supported family")


def _can_dequantise(kind: GGMLQuantizationType) -> bool:
    """Whether the installed library can, asked with one block of zeros."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
