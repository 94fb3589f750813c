"""A mixture of experts over a tensor-parallel group: members hold whole experts and a range of the shared ones' columns."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cp_layout.model_shape import MoeShape
from rank_server.models.linear import Gated, Linear


@dataclass(frozen=True, slots=True)
class Ffn:
    """SiLU-gated FFN, or a member's columns of one."""

    gated: Gated
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] → [T, H]; of a member's columns, its term of the sum over members."""
        return self.down(self.gated(x))


@dataclass(frozen=True, slots=True)
class Router:
    """Which experts a token goes through, and with what weights; in fp32 whatever the dtype of the rest."""

    shape: MoeShape
    weight: Tensor
    """[experts, H] fp32."""
    bias: Tensor | None
    """[experts] fp32, added to the scores for the choice alone."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] → (experts [T, k] int64, weights [T, k] fp32), the same on every rank that has the same x."""
        logits = functional.linear(x.to(torch.float32), self.weight)
        scores = logits.sigmoid() if self.shape.topk_method == "noaux_tc" else logits.softmax(-1)
        choice = scores if self.bias is None else scores + self.bias
        experts = self._within_groups(choice).topk(self.shape.experts_per_token, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.shape.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * self.shape.scaling_factor

    def _within_groups(self, choice: Tensor) -> Tensor:
        """Scores with −inf outside the token's groups."""
        if self.shape.groups_per_token == self.shape.num_groups:
            return choice
        grouped = choice.unflatten(-1, (self.shape.num_groups, -1))
        best = 2 if self.shape.topk_method == "noaux_tc" else 1
        of_group = grouped.topk(best, dim=-1).values.sum(-1)
        chosen = of_group.topk(self.shape.groups_per_token, dim=-1).indices
        outside = torch.ones_like(of_group, dtype=torch.bool).scatter_(-1, chosen, False)
        return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)


@dataclass(frozen=True, slots=True)
class Mixture:
    """One member's part of a layer's experts."""

    router: Router
    experts: Mapping[int, Ffn]
    """Those of the member, by number."""
    shared: Ffn

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] → [T, H], the member's term of the sum over members."""
        chosen, weights = self.router(x)
        out = self.shared(x).to(torch.float32)
        for number in chosen.unique().tolist():
            expert = self.experts.get(number)
            if expert is not None:
                rows, places = (chosen == number).nonzero(as_tuple=True)
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return out.to(x.dtype)
