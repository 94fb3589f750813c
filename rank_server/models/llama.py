"""Llama: the decoder of the default model, tensor-parallel."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from cp_layout.cuts import cut
from cp_layout.model_shape import ModelShape
from rank_server.collectives.base import Group

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class LlamaModel:
    def __init__(self, shape: ModelShape, weights: Mapping[str, Tensor], tp_group: Group, dtype: torch.dtype) -> None:
        self._shape, self._weights, self._tp, self._dtype = shape, weights, tp_group, dtype
        self._first, self._last = cut(shape.vocab_size, tp_group.size, tp_group.index)
        self._inverse_frequencies = 1.0 / (
            shape.rope_theta ** (torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim)
        )

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        w, shape = self._weights, self._shape
        x = self._embed(token_ids)
        angles = positions[:, None].float() * self._inverse_frequencies
        cos, sin = (torch.cat([f, f], dim=-1).to(self._dtype)[:, None, :] for f in (angles.cos(), angles.sin()))
        for i in range(shape.num_layers):
            p = f"model.layers.{i}."
            h = self._norm(x, w[p + "input_layernorm.weight"])
            q, k, v = (
                functional.linear(h, w[f"{p}self_attn.{name}.weight"]).view(len(h), -1, shape.head_dim)
                for name in ("q_proj", "k_proj", "v_proj")
            )
            out = attend(i, _rotate(q, cos, sin), _rotate(k, cos, sin), v)
            x = x + self._sum(functional.linear(out.flatten(1), w[p + "self_attn.o_proj.weight"]))
            h = self._norm(x, w[p + "post_attention_layernorm.weight"])
            gate = functional.silu(functional.linear(h, w[p + "mlp.gate_proj.weight"]))
            gate = gate * functional.linear(h, w[p + "mlp.up_proj.weight"])
            x = x + self._sum(functional.linear(gate, w[p + "mlp.down_proj.weight"]))
        return self._norm(x, w["model.norm.weight"])

    def logits(self, hidden: Tensor) -> Tensor:
        head = self._weights["model.embed_tokens.weight" if self._shape.tie_embeddings else "lm_head.weight"]
        local = functional.linear(hidden, head).float()
        if self._tp.size == 1:
            return local
        width = -(-self._shape.vocab_size // self._tp.size)
        parts = self._tp.all_gather(functional.pad(local, (0, width - local.shape[1])))
        cuts = [cut(self._shape.vocab_size, self._tp.size, i) for i in range(self._tp.size)]
        return torch.cat([parts[i, :, : last - first] for i, (first, last) in enumerate(cuts)], dim=1)

    def _embed(self, token_ids: Tensor) -> Tensor:
        table = self._weights["model.embed_tokens.weight"]
        if self._tp.size == 1:
            return table[token_ids]
        mine = (token_ids >= self._first) & (token_ids < self._last)
        rows = table[torch.where(mine, token_ids - self._first, 0)] * mine[:, None].to(table.dtype)
        return self._tp.all_reduce(rows)

    def _sum(self, x: Tensor) -> Tensor:
        return self._tp.all_reduce(x) if self._tp.size > 1 else x

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self._shape.rms_norm_eps)
        return weight * y.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
