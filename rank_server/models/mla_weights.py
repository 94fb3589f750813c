"""The weights of one rank of a model with latent attention, as a pass reads them."""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_layout.model_shape import ModelShape, MoeShape
from rank_server.attention.latent import UpProjection
from rank_server.models.linear import Linear, gated, linear
from rank_server.models.moe import Ffn, Mixture, Router


@dataclass(frozen=True, slots=True)
class MlaLayer:
    """One layer of a rank."""

    input_norm: Tensor
    first: Linear
    """[queries or their low rank ‖ latent] from hidden states."""
    q_norm: Tensor | None
    q_up: Linear | None
    latent_norm: Tensor
    up: UpProjection
    output: Linear
    ffn_norm: Tensor
    ffn: Ffn | Mixture


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """All weights of one TP member, each held once."""

    embedding: Tensor
    """[vocabulary of the member, H]."""
    head: Linear
    final_norm: Tensor
    layers: tuple[MlaLayer, ...]
    nbytes: int
    """Size of the tensors as they were loaded."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all but the routers."""
        return self.embedding.dtype

    @classmethod
    def of(cls, shape: ModelShape, weights: MutableMapping[str, Tensor], num_parts: int) -> "MlaWeights":
        """Takes over what `load_weights` gave, and empties it; no pass is split over replicas, so num_parts cuts nothing."""
        nbytes = sum(tensor.nbytes for tensor in weights.values())
        embedding = weights.pop("model.embed_tokens.weight")
        return cls(
            embedding=embedding,
            head=linear(embedding if shape.tie_embeddings else weights.pop("lm_head.weight")),
            final_norm=weights.pop("model.norm.weight"),
            layers=tuple(_layer(shape, weights, layer) for layer in range(shape.num_layers)),
            nbytes=nbytes,
        )


def _layer(shape: ModelShape, weights: MutableMapping[str, Tensor], layer: int) -> MlaLayer:
    mla, prefix = shape.mla, f"model.layers.{layer}."
    assert mla is not None

    def take(name: str) -> Tensor:
        return weights.pop(f"{prefix}{name}.weight")

    lora = mla.q_lora_rank is not None
    mixture = shape.moe if shape.is_mixture(layer) else None
    return MlaLayer(
        input_norm=take("input_layernorm"),
        first=linear(take("self_attn.qkv_proj")),
        q_norm=take("self_attn.q_a_layernorm") if lora else None,
        q_up=linear(take("self_attn.q_b_proj")) if lora else None,
        latent_norm=take("self_attn.kv_a_layernorm"),
        up=UpProjection.of(mla, take("self_attn.kv_b_proj").unflatten(0, (-1, mla.qk_nope_head_dim + mla.v_head_dim))),
        output=linear(take("self_attn.o_proj")),
        ffn_norm=take("post_attention_layernorm"),
        ffn=_ffn(weights, f"{prefix}mlp.") if mixture is None else _mixture(mixture, weights, f"{prefix}mlp."),
    )


def _mixture(shape: MoeShape, weights: MutableMapping[str, Tensor], prefix: str) -> Mixture:
    held = [expert for expert in range(shape.num_experts) if f"{prefix}experts.{expert}.down_proj.weight" in weights]
    return Mixture(
        router=Router(shape, weights.pop(f"{prefix}gate.weight"), weights.pop(f"{prefix}gate.e_score_correction_bias", None)),
        experts={expert: _ffn(weights, f"{prefix}experts.{expert}.") for expert in held},
        shared=_ffn(weights, f"{prefix}shared_experts."),
    )


def _ffn(weights: MutableMapping[str, Tensor], prefix: str) -> Ffn:
    gate, up = weights.pop(f"{prefix}gate_up_proj.weight").chunk(2)
    return Ffn(gated(gate, up), linear(weights.pop(f"{prefix}down_proj.weight")))
