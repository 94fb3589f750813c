"""The weights of one rank as a pass reads them: matrices with their cuts, norms, embedding."""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_layout.cuts import cut
from cp_layout.model_shape import ModelShape
from rank_server.models.linear import Gated, Linear, Portions, gated, parts_of, portions


@dataclass(frozen=True, slots=True)
class FfnColumns:
    """A range of the FFN's columns: the same rows of gate and up, and those columns of down."""

    gated: Gated
    down: Linear


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """Matrices of one layer, or one part of each."""

    qkv: Linear
    """Its output is [q‖k‖v], or those columns of it."""
    output: Linear
    output_columns: tuple[int, int]
    """Which inputs it takes."""
    ffn: FfnColumns


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer of a rank."""

    input_norm: Tensor
    head_norm: tuple[Tensor, Tensor] | None
    """The norms of each query head and of each key head, [D]."""
    ffn_norm: Tensor
    whole: LayerMatrices
    parts: tuple[LayerMatrices, ...]
    """The layer's matrices cut into near-equal parts."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of one TP member; matrices can be used whole or by parts, each is held once."""

    embedding: Tensor
    """[vocabulary of the member, H]."""
    head: Portions
    """Cut by vocabulary."""
    final_norm: Tensor
    layers: tuple[LayerWeights, ...]
    nbytes: int
    """Size of the tensors as they were loaded."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all of them."""
        return self.embedding.dtype

    @property
    def num_parts(self) -> int:
        """Into how many parts the matrices are cut."""
        return len(self.head.parts)

    @classmethod
    def of(cls, shape: ModelShape, weights: MutableMapping[str, Tensor], num_parts: int) -> "DecoderWeights":
        """Takes over what `load_weights` gave, and empties it."""
        nbytes = sum(tensor.nbytes for tensor in weights.values())
        embedding = weights.pop("model.embed_tokens.weight")
        head = embedding if shape.tie_embeddings else weights.pop("lm_head.weight")
        return cls(
            embedding=embedding,
            head=portions(head, None, "rows", num_parts),
            final_norm=weights.pop("model.norm.weight"),
            layers=tuple(_layer(shape, weights, index, num_parts) for index in range(shape.num_layers)),
            nbytes=nbytes,
        )


def _layer(shape: ModelShape, weights: MutableMapping[str, Tensor], index: int, num_parts: int) -> LayerWeights:
    prefix = f"model.layers.{index}."

    def take(name: str) -> Tensor:
        return weights.pop(f"{prefix}{name}")

    qkv = portions(
        take("self_attn.qkv_proj.weight"), take("self_attn.qkv_proj.bias") if shape.qkv_bias else None, "rows", num_parts
    )
    output_weight = take("self_attn.o_proj.weight")
    output, width = portions(output_weight, None, "columns", num_parts), output_weight.shape[1]
    halves = take("mlp.gate_up_proj.weight").chunk(2)
    down = portions(take("mlp.down_proj.weight"), None, "columns", num_parts)
    gates = map(gated, *(parts_of(half, "rows", num_parts) for half in halves))
    return LayerWeights(
        input_norm=take("input_layernorm.weight"),
        head_norm=(take("self_attn.q_norm.weight"), take("self_attn.k_norm.weight")) if shape.qk_norm else None,
        ffn_norm=take("post_attention_layernorm.weight"),
        whole=LayerMatrices(qkv.whole, output.whole, (0, width), FfnColumns(gated(*halves), down.whole)),
        parts=tuple(
            LayerMatrices(
                qkv.parts[part], output.parts[part], cut(width, num_parts, part), FfnColumns(gate_up, down.parts[part])
            )
            for part, gate_up in enumerate(gates)
        ),
    )
