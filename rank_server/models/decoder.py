"""The decoder of all supported families over a tensor-parallel group: everything of a forward pass but attention itself.

Members hold whole heads, a range of FFN columns and a range of the vocabulary. Activations are replicated: each block ends in
one sum over the members, so a pass costs 2·layers + 1 all-reduces, and logits one all-gather. Alone, there is no collective.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_layout.cuts import cut
from cp_layout.model_shape import ModelShape
from rank_server.collectives.base import Group
from rank_server.models.ends import embed, gathered, in_rows
from rank_server.models.linear import Linear
from rank_server.models.operations import operations_for
from rank_server.models.resident import DecoderWeights, LayerMatrices
from rank_server.models.rotary import Rotary
from rank_server.models.sharding import key_heads, query_heads, vocabulary

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, hq, D], k [T, hk, D], v [T, hk, D]) → [T, hq, D] with this member's hq query and hk KV heads; q and k are
rotated, and none of the three need be contiguous."""


@dataclass(frozen=True, slots=True)
class SplitGroups:
    """Groups of a pass that the replicas of a prefill context parallel (PCP) group share out among them."""

    pcp: Group
    """The ranks that hold the same slice of the weights: each computes one part of it."""
    wide: Group
    """All ranks of these replicas: member t·pcp + p computes part p of what TP member t holds."""


@dataclass(frozen=True, slots=True)
class _Way:
    """What one rank computes of a pass, and with whom it completes that."""

    layers: tuple[LayerMatrices, ...]
    head: Linear
    qkv_group: Group | None
    """Over whose members the rows of [q‖k‖v] are cut; None: over nobody's."""
    qkv_widths: list[int]
    """How many of these rows each of them has."""
    sum_group: Group | None
    """Over whose members blocks are summed and the vocabulary of the head is cut; None: over nobody's."""
    vocabulary: tuple[tuple[int, int], ...]
    """Token ids of each member's head, in member order."""


class DecoderModel:
    """One member's model over its resident weights.

    split: the groups for passes that are split over replicas; the weights are cut into as many parts as there are replicas.
    """

    def __init__(self, shape: ModelShape, weights: DecoderWeights, tp_group: Group, split: SplitGroups | None = None) -> None:
        self._shape = shape
        self._tp = tp_group
        self._weights = weights
        self._rotary = Rotary(shape, weights.embedding.device)
        self._operations = operations_for(weights.embedding.device, weights.dtype)
        first, last = query_heads(shape, tp_group.size, tp_group.index)
        self._num_q = last - first
        first, last = key_heads(shape, tp_group.size, tp_group.index)
        self._num_kv = last - first
        self._qkv_width = (self._num_q + 2 * self._num_kv) * shape.head_dim
        self._vocabulary = tuple(vocabulary(shape, tp_group.size, member) for member in range(tp_group.size))
        self._whole = _Way(
            layers=tuple(layer.whole for layer in weights.layers),
            head=weights.head.whole,
            qkv_group=None,
            qkv_widths=[self._qkv_width],
            sum_group=tp_group if tp_group.size > 1 else None,
            vocabulary=self._vocabulary,
        )
        self._split = None if split is None else self._split_way(split)

    def _split_way(self, groups: SplitGroups) -> _Way:
        part, tp = groups.pcp.index, self._tp.size
        if groups.pcp.size != self._weights.num_parts or groups.wide.index != self._tp.index * groups.pcp.size + part:
            raise ValueError(
                f"weights in {self._weights.num_parts} parts, member {groups.pcp.index} of {groups.pcp.name} "
                f"({groups.pcp.size}), {groups.wide.index} of {groups.wide.name} and {self._tp.index} of {self._tp.name} "
                f"({tp}) don't fit: need as many parts as members, and wide index = tp index · pcp + pcp index"
            )
        spans = []
        for first, last in self._vocabulary:
            for index in range(groups.pcp.size):
                start, stop = cut(last - first, groups.pcp.size, index)
                spans.append((first + start, first + stop))
        cuts = (cut(self._qkv_width, groups.pcp.size, index) for index in range(groups.pcp.size))
        return _Way(
            layers=tuple(layer.parts[part] for layer in self._weights.layers),
            head=self._weights.head.parts[part],
            qkv_group=groups.pcp,
            qkv_widths=[last - first for first, last in cuts],
            sum_group=groups.wide,
            vocabulary=tuple(spans),
        )

    @property
    def compiled(self) -> bool:
        """Whether all that a pass over few rows calls, attention aside, are compiled programs."""
        return self._weights.embedding.device.type == "cpu" and self._weights.dtype == torch.bfloat16

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, split: bool = False, answered: Tensor | None = None
    ) -> Tensor:
        """token_ids [T] and absolute positions [T], int64 → hidden states [T, H] after the final norm, equal on all members.

        Rows may belong to several requests: only `attend` relates rows to each other. split: the replicas, which must all be
        given the same rows, share out the work; one more all-gather per layer, and ValueError without `SplitGroups`. answered:
        [A] int64 the rows that are wanted, the same on all members; others come back as zeros. None: all.
        """
        hidden = self.between(*self.begin(token_ids, positions), attend, split, answered)
        return hidden if answered is None else in_rows(hidden, answered, len(token_ids))

    def begin(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a pass begins with: x [T, H], and cos and sin of its positions, as of `Rotary.at`."""
        x = self._embed(token_ids)
        return x, *self._rotary.at(positions, x.dtype)

    def between(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, split: bool = False, answered: Tensor | None = None
    ) -> Tensor:
        """The rest of the pass: [A, H] of the rows that are wanted, as `forward` says."""
        way = self._way(split)
        eps = self._shape.rms_norm_eps
        for index, (layer, matrices) in enumerate(zip(self._weights.layers, way.layers, strict=True)):
            heads = self._qkv(self._norm(x, layer.input_norm), matrices.qkv, way)
            q, k, v = self._operations.turn(heads, self._num_q, cos, sin, layer.head_norm, eps)
            attended = attend(index, q, k, v).flatten(1)
            if answered is not None and index + 1 == len(way.layers):
                attended, x = attended[answered], x[answered]
            first, last = matrices.output_columns
            x = _added(matrices.output, attended[:, first:last], x, way.sum_group)
            normed = self._norm(x, layer.ffn_norm)
            x = _added(matrices.ffn.down, matrices.ffn.gated(normed), x, way.sum_group)
        return self._norm(x, self._weights.final_norm)

    def logits(self, hidden: Tensor, split: bool = False) -> Tensor:
        """[R, H] → [R, vocabulary] fp32, bit-identical on all members; split: a collective of all replicas."""
        way = self._way(split)
        local = way.head(hidden)
        if way.sum_group is None:
            return local.float()
        return gathered(local, [last - first for first, last in way.vocabulary], way.sum_group).float()

    def _way(self, split: bool) -> _Way:
        if not split:
            return self._whole
        if self._split is None:
            raise ValueError("a pass can't be split: the model has no groups for it")
        return self._split

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Each replica has the whole embedding and a look-up costs nothing, so this is never split."""
        return embed(self._weights.embedding, token_ids, self._vocabulary[self._tp.index], self._tp)

    def _qkv(self, x: Tensor, matrix: Linear, way: _Way) -> Tensor:
        """[T, hq + 2·hk, D]."""
        local = matrix(x)
        if way.qkv_group is not None:
            local = gathered(local, way.qkv_widths, way.qkv_group)
        return local.view(x.shape[0], self._num_q + 2 * self._num_kv, self._shape.head_dim)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._operations.rms_norm(x, weight, self._shape.rms_norm_eps)


def _added(matrix: Linear, y: Tensor, x: Tensor, group: Group | None) -> Tensor:
    """x + y·Wᵀ; of a group, members hold W by columns, and one of them adds the residual stream x."""
    if group is None:
        return matrix.plus(y, x)
    return group.all_reduce(matrix.plus(y, x) if group.index == 0 else matrix(y))
