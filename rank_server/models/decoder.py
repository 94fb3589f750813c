"""The decoder of all supported families over a tensor-parallel group: everything of a forward pass but attention itself.

Members hold whole heads, a range of FFN columns and a range of the vocabulary. Activations are replicated: each block ends in
one sum over the members, so a pass costs 2·layers + 1 all-reduces, and logits one all-gather. Alone, there is no collective.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cp_layout.model_shape import ModelShape
from rank_server.collectives.base import Group
from rank_server.models.rotary import Rotary, rotate
from rank_server.models.sharding import key_heads, query_heads, vocabulary

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, hq, D], k [T, hk, D], v [T, hk, D]) → [T, hq, D] with this member's hq query and hk KV heads; q and k are
rotated, and none of the three need be contiguous."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    """[query and key heads of the member, D]: the weight of each head's own norm."""
    output: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], layer: int, shape: ModelShape, num_q: int, num_kv: int) -> "_Layer":
        prefix = f"model.layers.{layer}."
        head_norm = None
        if shape.qk_norm:
            of_queries, of_keys = (weights[f"{prefix}self_attn.{kind}_norm.weight"] for kind in "qk")
            head_norm = torch.cat((of_queries.expand(num_q, -1), of_keys.expand(num_kv, -1)))
        return cls(
            input_norm=weights[f"{prefix}input_layernorm.weight"],
            qkv=weights[f"{prefix}self_attn.qkv_proj.weight"],
            qkv_bias=weights[f"{prefix}self_attn.qkv_proj.bias"] if shape.qkv_bias else None,
            head_norm=head_norm,
            output=weights[f"{prefix}self_attn.o_proj.weight"],
            ffn_norm=weights[f"{prefix}post_attention_layernorm.weight"],
            gate_up=weights[f"{prefix}mlp.gate_up_proj.weight"],
            down=weights[f"{prefix}mlp.down_proj.weight"],
        )


class DecoderModel:
    """One member's model over the weights that `load_weights` gives for the member's place in `tp_group`, all in `dtype`."""

    def __init__(self, shape: ModelShape, weights: Mapping[str, Tensor], tp_group: Group, dtype: torch.dtype) -> None:
        self._shape = shape
        self._tp = tp_group
        self._dtype = dtype
        self._embedding = weights["model.embed_tokens.weight"]
        self._head = self._embedding if shape.tie_embeddings else weights["lm_head.weight"]
        self._final_norm = weights["model.norm.weight"]
        self._rotary = Rotary(shape, self._embedding.device)
        self._vocabulary = [vocabulary(shape, tp_group.size, member) for member in range(tp_group.size)]
        first, last = query_heads(shape, tp_group.size, tp_group.index)
        self._num_q = last - first
        first, last = key_heads(shape, tp_group.size, tp_group.index)
        self._num_kv = last - first
        self._layers = [_Layer.of(weights, layer, shape, self._num_q, self._num_kv) for layer in range(shape.num_layers)]

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids [T] and absolute positions [T], int64 → hidden states [T, H] after the final norm, equal on all members.

        Rows may belong to several requests: only `attend` relates rows to each other.
        """
        x = self._embed(token_ids)
        cos, sin = self._rotary.at(positions, self._dtype)
        for index, layer in enumerate(self._layers):
            qkv = functional.linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
            heads = qkv.view(len(qkv), self._num_q + 2 * self._num_kv, self._shape.head_dim)
            turning, values = heads[:, : self._num_q + self._num_kv], heads[:, self._num_q + self._num_kv :]
            if layer.head_norm is not None:
                turning = self._norm(turning, None) * layer.head_norm
            turned = rotate(turning, cos, sin)
            attended = attend(index, turned[:, : self._num_q], turned[:, self._num_q :], values)
            x = x + self._sum(functional.linear(attended.flatten(1), layer.output))
            gate, up = functional.linear(self._norm(x, layer.ffn_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + self._sum(functional.linear(functional.silu(gate) * up, layer.down))
        return self._norm(x, self._final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] → [R, vocabulary] fp32, bit-identical on all members."""
        local = functional.linear(hidden, self._head)
        if self._tp.size == 1:
            return local.float()
        # Members hold ⌊V/T⌋ or ⌈V/T⌉ ids; all send ⌈V/T⌉ columns and the surplus is cut away.
        width = -(-self._shape.vocab_size // self._tp.size)
        parts = self._tp.all_gather(functional.pad(local, (0, width - local.shape[1])))
        return torch.cat(
            [part[:, : last - first] for part, (first, last) in zip(parts, self._vocabulary, strict=True)], 1
        ).float()

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._tp.size == 1:
            return self._embedding[token_ids]
        first, last = self._vocabulary[self._tp.index]
        mine = (token_ids >= first) & (token_ids < last)
        x = torch.zeros(len(token_ids), self._shape.hidden_size, dtype=self._dtype, device=token_ids.device)
        x[mine] = self._embedding[token_ids[mine] - first]
        return self._sum(x)

    def _sum(self, x: Tensor) -> Tensor:
        return x if self._tp.size == 1 else self._tp.all_reduce(x)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        # torch computes it in fp32 whatever the dtype of x.
        return functional.rms_norm(x, (x.shape[-1],), weight, self._shape.rms_norm_eps)
