"""What turns a latent into keys and values, and the two ways of attending with it.

A latent is [c ‖ k_pe]: the compressed KV (dc) and the rotated part of the key (dr) that all heads share. With W_UK and W_UV of
a head, its key is [W_UK·c ‖ k_pe] and its value W_UV·c. Since q·(W_UK·c) = (W_UKᵀ·q)·c, attention can also run on the latents
themselves (*absorbed*: one KV head of width dc + dr whose values are its first dc elements) and W_UV be applied to the result.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cp_layout.model_shape import MlaShape


@dataclass(frozen=True, slots=True)
class UpProjection:
    """W_UK and W_UV of one rank's heads in one layer.

    Each of the two lies in memory without a gap: a batched product over matrices with gaps between them copies them first.
    """

    shape: MlaShape
    w_uk: Tensor
    """[h, dn, dc], contiguous."""
    w_uv: Tensor
    """[h, dv, dc], contiguous."""
    both: Tensor
    """[h·dn + h·dv, dc], what the two are views of."""

    @classmethod
    def of(cls, shape: MlaShape, weight: Tensor) -> "UpProjection":
        """From [h, dn + dv, dc] as checkpoints have it; a copy."""
        heads, _, width = weight.shape
        keys, values = weight.split((shape.qk_nope_head_dim, shape.v_head_dim), 1)
        both = torch.cat((keys.flatten(0, 1), values.flatten(0, 1)))
        w_uk, w_uv = (part.view(heads, -1, width) for part in both.split((keys.shape[1] * heads, values.shape[1] * heads)))
        return cls(shape, w_uk, w_uv, both)

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [T, h, dn + dr] → [T, h, dc + dr], to be multiplied with latents."""
        dn = self.shape.qk_nope_head_dim
        latent = torch.bmm(q[..., :dn].transpose(0, 1), self.w_uk)
        return torch.cat((latent.transpose(0, 1), q[..., dn:]), -1)

    def values(self, out: Tensor) -> Tensor:
        """Attention over latents [T, h, dc] → over values [T, h, dv], in the weights' dtype."""
        return torch.bmm(out.to(self.w_uv.dtype).transpose(0, 1), self.w_uv.transpose(1, 2)).transpose(0, 1)

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [n, dc + dr] → keys [h, n, dn + dr] and values [h, n, dv] in the weights' dtype."""
        latents = latents.to(self.both.dtype)
        dc, heads, dn = self.shape.kv_lora_rank, len(self.w_uk), self.shape.qk_nope_head_dim
        both = torch.nn.functional.linear(latents[:, :dc], self.both)
        keys, values = (part.unflatten(1, (heads, -1)).transpose(0, 1) for part in both.tensor_split((heads * dn,), 1))
        shared = latents[:, dc:].expand(heads, -1, -1)
        return torch.cat((keys, shared), -1), values


def expanding_pays(shape: MlaShape, queries: int) -> bool:
    """Whether attending with expanded keys takes fewer multiplications than absorbed, for so many queries of one request.

    Per head and key the one costs dc·(dn + dv) once and dn + dr + dv per query, the other 2·dc + dr per query.
    """
    up = shape.qk_nope_head_dim + shape.v_head_dim
    return queries * (2 * shape.kv_lora_rank - up) > shape.kv_lora_rank * up
