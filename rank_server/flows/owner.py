"""Each row is computed by one replica: decode rows by their owner, prefill rows head-tail by all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cp_layout.zigzag import BatchRow, Partition, partition
from rank_server.attention.batch import AttentionBatch
from rank_server.attention.context import context_gathers
from rank_server.attention.group_merge import MERGES
from rank_server.attention.pcp import RowExchange
from rank_server.attention.rows import KvRow, Span, attention_batch, gathered_batch, slots_of
from rank_server.attention.shard import ShardAttention
from rank_server.attention.side_by_side import side_by_side
from rank_server.collectives.base import Group
from rank_server.flows.base import Flow, Way
from rank_server.flows.gather_kv import GatherKvWay, OwnRow
from rank_server.flows.gather_q import GatherQWay
from rank_server.flows.local import LocalWay, ReplicatedKvWay
from rank_server.place import Place
from rank_server.share import Share, owned


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one kind."""

    places: Tensor
    """[r] int64 where they stand among the rows that this replica computes."""
    way: Way


@dataclass(frozen=True, slots=True)
class OwnerFlow:
    """`Flow` over one or two kinds of rows, which go one after the other."""

    parts: Sequence[Part]

    def attend(self, layer: int, q: Tensor, *rows: Tensor) -> Tensor:
        """See `Flow`."""
        kv = side_by_side(*rows)
        if len(self.parts) == 1:
            return self.parts[0].way.complete(layer, q, kv)
        outs = torch.cat([part.way.complete(layer, q[part.places], kv[part.places]) for part in self.parts])
        attended = torch.empty_like(outs)
        attended[torch.cat([part.places for part in self.parts])] = outs
        return attended


class OwnerFlows:
    """Makes the flows of one rank. group: the rank's group of a kind; workspace_bytes: what one gather of context may bring."""

    def __init__(
        self,
        place: Place,
        attention: ShardAttention,
        group: Callable[[str], Group],
        workspace_bytes: int,
        device: torch.device,
    ) -> None:
        self._place = place
        self._attention = attention
        self._pcp_group, self._dcp_group = group("pcp"), group("dcp")
        self._merge = MERGES[place.merge]
        self._workspace_bytes = workspace_bytes
        self._device = device

    def of(
        self, rows: Sequence[KvRow], owners: Sequence[int | None], queries_travel: bool, keys_to_all: bool = False
    ) -> tuple[Share, Flow]:
        """owners: replica that computes a decode row, None for a prefill row; queries_travel: how prefill rows are completed;
        keys_to_all: keys travel to decode rows too, over a sharded cache.

        Decode rows go first, so that every rank has the same order of collectives.
        """
        place = self._place
        cut = partition(
            [BatchRow(row.start, row.count, owner) for row, owner in zip(rows, owners, strict=True)], place.grid.pcp
        )
        decodes = np.array([owner is not None for owner in owners])
        if place.grid.dcp == 1:
            kinds = [(decodes, self._local), (~decodes, self._replicated_kv)]
        elif queries_travel:
            kinds = [(np.ones_like(decodes), self._gather_q)]
        elif keys_to_all:
            kinds = [(np.ones_like(decodes), self._gather_kv)]
        else:
            kinds = [(decodes, self._gather_q), (~decodes, self._gather_kv)]
        mine = cut.pieces_of(place.pcp_index)
        row_of_token = np.repeat(cut.piece_row[mine], cut.piece_length[mine])
        parts = [
            Part(self._tensor(np.flatnonzero(kind[row_of_token])), way(rows, cut if kind.all() else cut.only(kind)))
            for kind, way in kinds
            if kind.any()
        ]
        return owned(cut, place.pcp_index), OwnerFlow(parts)

    def _local(self, rows: Sequence[KvRow], part: Partition) -> Way:
        return LocalWay(self._attention, attention_batch(rows, self._own_spans(part), self._place.layout, self._device))

    def _replicated_kv(self, rows: Sequence[KvRow], part: Partition) -> Way:
        return ReplicatedKvWay(
            attention=self._attention,
            batch=attention_batch(rows, self._own_spans(part), self._place.layout, self._device),
            slots=self._gathered(rows, part).slots,
            exchange=self._exchange(part),
            pcp_group=self._pcp_group,
        )

    def _gather_q(self, rows: Sequence[KvRow], part: Partition) -> Way:
        return GatherQWay(
            attention=self._attention,
            batch=self._gathered(rows, part),
            exchange=self._exchange(part),
            dcp_group=self._dcp_group,
            merge=self._merge,
        )

    def _gather_kv(self, rows: Sequence[KvRow], part: Partition) -> Way:
        own_rows = self._own_rows(part)
        everybodys = _all_spans(part)
        return GatherKvWay(
            attention=self._attention,
            slots=slots_of(rows, everybodys, self._place.layout, self._device),
            own_rows=own_rows,
            context=context_gathers(
                [(span.row, rows[span.row]) for span in everybodys],
                {own.row for own in own_rows},
                self._place.layout,
                self._attention.row_bytes,
                self._workspace_bytes,
                self._device,
            ),
            exchange=self._exchange(part),
            pcp_group=self._pcp_group,
            dcp_group=self._dcp_group,
        )

    def _own_rows(self, part: Partition) -> tuple[OwnRow, ...]:
        runs: dict[int, list[tuple[int, int]]] = {}
        for span in self._own_spans(part):
            before = span.start - int(part.row_start[span.row])
            runs.setdefault(span.row, []).append((before, before + span.count))
        own_rows, at = [], 0
        for row, of_row in runs.items():
            first = int(part.first_of_row[row])
            seen = torch.cat([torch.arange(start + 1, stop + 1, device=self._device) for start, stop in of_row])
            own_rows.append(OwnRow(row, slice(at, at + len(seen)), slice(first, first + of_row[-1][1]), seen))
            at += len(seen)
        return tuple(own_rows)

    def _gathered(self, rows: Sequence[KvRow], part: Partition) -> AttentionBatch:
        """All replicas' rows over this rank's shard, in gather order."""
        return gathered_batch(rows, owned(part, self._place.pcp_index).answered, self._place.layout, self._device)

    def _own_spans(self, part: Partition) -> tuple[Span, ...]:
        return owned(part, self._place.pcp_index).spans

    def _exchange(self, part: Partition) -> RowExchange:
        return RowExchange(part, self._place.pcp_index, self._device)

    def _tensor(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _all_spans(part: Partition) -> tuple[Span, ...]:
    """The partition's rows as a whole, in batch order."""
    counts = np.diff(part.first_of_row)
    return tuple(Span(row, int(part.row_start[row]), int(counts[row])) for row in np.flatnonzero(counts).tolist())
