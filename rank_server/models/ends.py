"""Both ends of a decoder whose vocabulary is cut over a group: embedding, and logits put together."""

import torch
from torch import Tensor
from torch.nn import functional

from rank_server.collectives.base import Group


def embed(embedding: Tensor, token_ids: Tensor, span: tuple[int, int], tp_group: Group) -> Tensor:
    """[T] int64 → [T, H], equal on all members; embedding: [last − first, H], the rows of the member's ids [first, last)."""
    if tp_group.size == 1:
        return embedding[token_ids]
    first, last = span
    mine = (token_ids >= first) & (token_ids < last)
    x = torch.zeros(len(token_ids), embedding.shape[1], dtype=embedding.dtype, device=token_ids.device)
    x[mine] = embedding[token_ids[mine] - first]
    return tp_group.all_reduce(x)


def in_rows(hidden: Tensor, rows: Tensor, count: int) -> Tensor:
    """[A, H] of the given rows [A] → [count, H], zeros elsewhere."""
    return hidden.new_zeros((count, hidden.shape[1])).index_copy_(0, rows, hidden)


def gathered(local: Tensor, widths: list[int], group: Group) -> Tensor:
    """[T, widths[i]] of each member → [T, sum of widths]. Counts must be equal: all send as many columns as the widest has."""
    widest = max(widths)
    padded = local if local.shape[1] == widest else functional.pad(local, (0, widest - local.shape[1]))
    parts = group.all_gather(padded)
    if min(widths) == widest:
        return parts.transpose(0, 1).flatten(1)
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)
