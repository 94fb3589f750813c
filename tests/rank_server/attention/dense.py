"""Dense attention in float64: what every paged, sharded or merged form is compared with."""

import torch
from torch import Tensor


def dense_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [T, h, D] over k, v [L, hk, D], query t over the first visible[t] keys → (out [T, h, D], lse [T, h]) float64."""
    share = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(share, dim=1) for x in (k, v))
    scores = torch.einsum("thd,lhd->thl", q.double(), keys) * scale
    hidden = torch.arange(k.shape[0]) >= visible[:, None]
    scores.masked_fill_(hidden[:, None, :], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse[..., None].isinf(), 0.0, (scores - lse[..., None]).exp())
    return torch.einsum("thl,lhd->thd", weights, values), lse
