"""TP members as threads over `local` groups, and dense causal attention for them."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from model_files import open_model
from rank_server.collectives.base import Group
from rank_server.collectives.local import LocalBackend, LocalHub
from rank_server.models.decoder import DecoderModel
from rank_server.models.table import build_model, load_weights, resident_weights
from tests.devices import CPU
from tests.rank_server.threads import run_ranks

Result = TypeVar("Result")


class DenseAttention:
    """`attend` of one sequence: keeps every K and V it has seen; new rows see all earlier ones and themselves."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self._seen:
            k, v = (torch.cat((old, new)) for old, new in zip(self._seen[layer], (k, v), strict=True))
        self._seen[layer] = k, v
        rows, keys = len(q), len(k)
        k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q.float(), k) * q.shape[-1] ** -0.5
        future = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
        shares = scores.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", shares, v).to(q.dtype)


def on_members(
    path: Path, tp: int, use: Callable[[DecoderModel, Group], Result], dtype: torch.dtype = torch.float32
) -> list[Result]:
    """use(model, group) on every member of a TP group of that size, in member order."""
    files, hub = open_model(path), LocalHub()
    bootstrap = hub.new_room("tp:0", range(tp))

    def member(rank: int) -> Result:
        with torch.inference_mode():
            group = LocalBackend(hub).open("tp:0", range(tp), rank, bootstrap, timeout_s=20.0)
            weights = load_weights(files, tp, rank, dtype, lambda done, total: None, CPU)
            return use(build_model(files.shape, resident_weights(files.shape, weights, 1), group), group)

    return run_ranks(tp, member)


def whole_prompt(model: DecoderModel, ids: list[int]) -> Tensor:
    """[len(ids), vocabulary] logits of one pass over the prompt."""
    return model.logits(model.forward(torch.tensor(ids), torch.arange(len(ids)), DenseAttention()))
