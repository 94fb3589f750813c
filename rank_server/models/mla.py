"""The DeepSeek decoder over a tensor-parallel group: latent attention, then a dense FFN or a mixture of experts.

Members hold whole query heads and what makes keys and values of them out of the latents; the projection to the latent itself is
the same on all, as is the latent.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cp_layout.model_shape import MlaShape, ModelShape
from rank_server.collectives.base import Group
from rank_server.models.decoder import SplitGroups
from rank_server.models.ends import embed, gathered, in_rows
from rank_server.models.mla_weights import MlaLayer, MlaWeights
from rank_server.models.operations import operations_for
from rank_server.models.rotary import Rotary, rotate, rotate_pairs
from rank_server.models.sharding import query_heads, vocabulary

LatentAttend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, q [T, h, dn + dr], latents [T, 1, dc + dr]) → [T, h, dv] with this member's h heads; what is rotated is rotated."""

LORA_NORM_EPS = 1e-6
"""Of the norms inside the low-rank projections, whatever the configuration says of the others."""


class MlaModel:
    """One member's model over its resident weights.

    Passes can't be split over replicas: split is taken for the sake of the common interface.
    """

    def __init__(self, shape: ModelShape, weights: MlaWeights, tp_group: Group, split: SplitGroups | None = None) -> None:
        assert shape.mla is not None
        self._shape = shape
        self._mla: MlaShape = shape.mla
        self._tp = tp_group
        self.weights = weights
        self._rotary = Rotary(shape, weights.embedding.device)
        self._operations = operations_for(weights.embedding.device, weights.dtype)
        first, last = query_heads(shape, tp_group.size, tp_group.index)
        self._heads = last - first
        self._vocabulary = [vocabulary(shape, tp_group.size, member) for member in range(tp_group.size)]

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: LatentAttend, split: bool = False, answered: Tensor | None = None
    ) -> Tensor:
        """token_ids [T] and absolute positions [T], int64 → hidden states [T, H] after the final norm, equal on all members.

        Rows may belong to several requests: only `attend` relates rows to each other. ValueError for a split pass. answered:
        see `DecoderModel.forward`.
        """
        if split:
            raise ValueError("a pass of a model with latent attention can't be split")
        x = embed(self.weights.embedding, token_ids, self._vocabulary[self._tp.index], self._tp)
        cos, sin = self._rotary.at(positions, x.dtype)
        for index, layer in enumerate(self.weights.layers):
            q, latents = self._project(layer, self._norm(x, layer.input_norm), cos, sin)
            attended = attend(index, q, latents.unsqueeze(1))
            if answered is not None and index + 1 == len(self.weights.layers):
                attended, x = attended[answered], x[answered]
            x = x + self._sum(layer.output(attended.flatten(1)))
            x = x + self._sum(layer.ffn(self._norm(x, layer.ffn_norm)))
        hidden = self._norm(x, self.weights.final_norm)
        return hidden if answered is None else in_rows(hidden, answered, len(token_ids))

    def logits(self, hidden: Tensor, split: bool = False) -> Tensor:
        """[R, H] → [R, vocabulary] fp32, bit-identical on all members."""
        local = self.weights.head(hidden)
        if self._tp.size == 1:
            return local.float()
        return gathered(local, [last - first for first, last in self._vocabulary], self._tp).float()

    def _project(self, layer: MlaLayer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(q [T, h, dn + dr], latents [T, dc + dr])."""
        mla = self._mla
        first = layer.first(x)
        q, latent = first[:, : -mla.latent_dim], first[:, -mla.latent_dim :]
        if layer.q_norm is not None and layer.q_up is not None:
            q = layer.q_up(self._operations.rms_norm(q, layer.q_norm, LORA_NORM_EPS))
        q = q.unflatten(-1, (self._heads, mla.qk_head_dim))
        turn = rotate_pairs if mla.rope_interleave else rotate
        q = torch.cat((q[..., : mla.qk_nope_head_dim], turn(q[..., mla.qk_nope_head_dim :], cos, sin)), -1)
        compressed, key = latent[:, : mla.kv_lora_rank], latent[:, None, mla.kv_lora_rank :]
        compressed = self._operations.rms_norm(compressed, layer.latent_norm, LORA_NORM_EPS)
        return q, torch.cat((compressed, turn(key, cos, sin)[:, 0]), -1)

    def _sum(self, x: Tensor) -> Tensor:
        return x if self._tp.size == 1 else self._tp.all_reduce(x)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._operations.rms_norm(x, weight, self._shape.rms_norm_eps)
