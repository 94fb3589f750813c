"""Latent attention of a whole grid of ranks, from plan to output, against dense float64 over explicit keys and values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_layout.cuts import cut
from cp_layout.model_shape import MlaShape, ModelShape
from rank_server.attention.latent import UpProjection
from rank_server.kv_pool import KvPool
from rank_server.place import Place
from tests.exactness.flows import FlowCluster
from tests.inproc import Shape
from tests.rank_server.attention.dense import dense_attention


class LatentFlowCluster(FlowCluster):
    """`FlowCluster` of one layer of latent attention."""

    def __init__(self, shape: Shape, mla: MlaShape, heads: int = 4, tolerance: float = 5e-6, blocks: int = 512) -> None:
        self.mla = mla
        generator = torch.Generator().manual_seed(6)
        width = mla.qk_nope_head_dim + mla.v_head_dim
        self.weight = torch.randn(heads, width, mla.kv_lora_rank, generator=generator) * mla.kv_lora_rank**-0.5
        super().__init__(shape, heads, 1, tolerance, blocks)

    def build_model(self, heads: int, kv_heads: int) -> ModelShape:
        """See `FlowCluster`."""
        width = self.mla.qk_rope_head_dim
        return ModelShape("deepseek", 1, 16, heads, kv_heads, width, 8, 16, 4096, 1e-5, 100.0, False, "float32", mla=self.mla)

    def drawn(self, length: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `FlowCluster`."""
        q = self.random(length, self.model.num_heads, self.mla.qk_head_dim)
        return q, (self.random(length, 1, self.mla.latent_dim),)

    def ups(self, place: Place) -> Sequence[UpProjection]:
        """See `FlowCluster`."""
        first, last = cut(self.model.num_heads, place.grid.tp, place.tp_index)
        return [UpProjection.of(self.mla, self.weight[first:last].to(place.dtype))]

    def caches(self, pool: KvPool) -> Sequence[Tensor]:
        """See `FlowCluster`."""
        return [pool.latents(0).flatten(0, 1).unsqueeze(1)]

    def wanted(self, place: Place, q: Tensor, stored: Sequence[Tensor], visible: Tensor) -> Tensor:
        """See `FlowCluster`."""
        latents, weight = stored[0][:, 0].to(place.dtype).to(place.kv_dtype).double(), self.weight.to(place.dtype).double()
        compressed, shared = latents.split([self.mla.kv_lora_rank, self.mla.qk_rope_head_dim], 1)
        both = torch.einsum("hdc,nc->nhd", weight, compressed)
        keys, values = both.split([self.mla.qk_nope_head_dim, self.mla.v_head_dim], 2)
        keys = torch.cat((keys, shared[:, None].expand(-1, self.model.num_heads, -1)), 2)
        return dense_attention(q.to(place.dtype), keys, values, visible, self.model.score_scale)[0]
