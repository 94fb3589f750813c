"""The weights of one rank as a pass reads them: matrices with their cuts, norms, embedding."""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_layout.cuts import cut
from cp_layout.model_shape import ModelShape
from rank_server.models.linear import Linear, Portions, portions

TIED_COPY_BYTES = 64 << 20
"""A tied head up to this size is packed, beside the embedding that is looked up row by row; a larger one is held once."""


@dataclass(frozen=True, slots=True)
class FfnColumns:
    """A range of the FFN's columns: the same rows of gate and up, and those columns of down."""

    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """Matrices of one layer, or one part of each. Where there are several of a kind, in order, they are parts of one."""

    qkv: tuple[Linear, ...]
    """Their outputs stand side by side: [q‖k‖v]."""
    output: tuple[Linear, ...]
    """Each for its columns; their results are added up."""
    output_columns: tuple[tuple[int, int], ...]
    """Which inputs each of `output` takes."""
    ffn: tuple[FfnColumns, ...]
    """Their results are added up."""


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
    """All weights of one TP member; matrices can be used whole or by parts. Each is held once, but for a small tied head."""

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
        """Takes over what `load_weights` gave, and empties it: a matrix is given up as soon as it has its new order."""
        nbytes = sum(tensor.nbytes for tensor in weights.values())
        embedding = weights.pop("model.embed_tokens.weight")
        if not shape.tie_embeddings:
            head = portions(weights.pop("lm_head.weight"), None, "rows", num_parts)
        else:
            head = portions(embedding, None, "rows", num_parts, in_place=embedding.nbytes > TIED_COPY_BYTES)
        return cls(
            embedding=embedding,
            head=head,
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
    output, output_columns = _by_columns(take("self_attn.o_proj.weight"), num_parts)
    gate, up = (portions(half, None, "rows", num_parts) for half in take("mlp.gate_up_proj.weight").chunk(2))
    down, _ = _by_columns(take("mlp.down_proj.weight"), num_parts)
    ffn = tuple(map(FfnColumns, gate.parts, up.parts, down.parts))
    whole_ffn = tuple(map(FfnColumns, gate.whole, up.whole, down.whole))
    return LayerWeights(
        input_norm=take("input_layernorm.weight"),
        head_norm=(take("self_attn.q_norm.weight"), take("self_attn.k_norm.weight")) if shape.qk_norm else None,
        ffn_norm=take("post_attention_layernorm.weight"),
        whole=LayerMatrices(
            qkv=qkv.whole,
            output=output.whole,
            output_columns=output_columns if len(output.whole) > 1 else ((0, output_columns[-1][1]),),
            ffn=whole_ffn,
        ),
        parts=tuple(
            LayerMatrices((qkv.parts[part],), (output.parts[part],), (output_columns[part],), (ffn[part],))
            for part in range(num_parts)
        ),
    )


def _by_columns(weight: Tensor, num_parts: int) -> tuple[Portions, tuple[tuple[int, int], ...]]:
    spans = tuple(cut(weight.shape[1], num_parts, part) for part in range(num_parts))
    return portions(weight, None, "columns", num_parts), spans
