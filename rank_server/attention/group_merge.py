"""Merging partial attention over a group: each member holds partials of everybody's rows over its own keys."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rank_server.attention.merge import merge_packed, merge_partials, scaled, shares
from rank_server.attention.move_program import packed
from rank_server.collectives.base import Group

APART_BYTES = 512 * 1024
"""Partial outputs that are at least as large travel as they lie, and are read where they arrive: to pack them takes longer."""

Chunks = Callable[[Tensor], Tensor]
"""[T, h, E] of all rows and heads of the group → [N, *s, E]: chunk j holds what belongs to member j, all of equal shape."""
GroupMerge = Callable[[Group, Tensor, Tensor, Chunks], Tensor]
"""(group, out [T, h, D], lse [T, h], chunks) → [*s, D] fp32: attention over all members' keys of this member's own chunk."""


def merge_a2a(group: Group, out: Tensor, lse: Tensor, chunks: Chunks) -> Tensor:
    """One all-to-all of out‖lse, merged at the receiver; from `APART_BYTES` on of out and lse side by side."""
    if out.nbytes < APART_BYTES:
        return merge_packed(group.all_to_all(chunks(packed(out, lse))))
    outs, lses = group.all_to_all_lent(chunks(out), chunks(lse.unsqueeze(-1)))
    return merge_partials(outs, torch.stack(list(lses)).squeeze(-1))[0]


def merge_whole(group: Group, out: Tensor, lse: Tensor) -> Tensor:
    """The same where every member wants all rows and heads: what goes to each of them is alike, and is sent as it lies."""
    return merge_packed(group.all_gather(packed(out, lse)))


def merge_ag_rs(group: Group, out: Tensor, lse: Tensor, chunks: Chunks) -> Tensor:
    """All-gather of lse, scaling, reduce-scatter."""
    weights, _ = shares(group.all_gather(lse))
    return group.reduce_scatter(chunks(scaled(out, weights[group.index])))


MERGES: Mapping[str, GroupMerge] = {"a2a": merge_a2a, "ag_rs": merge_ag_rs}
