"""The exchange of rows between replicas, and the plan of context gathers, without any attention."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cp_layout.interleave import NOT_MINE, Layout
from cp_layout.zigzag import BatchRow, partition
from rank_server.attention.context import context_gathers
from rank_server.attention.pcp import RowExchange
from rank_server.attention.rows import KvRow, attention_batch, gathered_batch
from rank_server.collectives.local import LocalBackend, LocalHub
from rank_server.share import owned
from tests.rank_server.collectives.harness import open_groups
from tests.rank_server.threads import run_ranks

CPU = torch.device("cpu")
BATCHES = [
    [BatchRow(0, 1)],
    [BatchRow(5, 9), BatchRow(7, 1, 0), BatchRow(0, 3), BatchRow(2, 1, 1)],
    [BatchRow(3, 1, 1), BatchRow(9, 1, 1), BatchRow(4, 1, 1)],
]


@pytest.mark.parametrize("batch", BATCHES, ids=len)
@pytest.mark.parametrize("replicas", [2, 3])
def test_d6_rows_come_back_in_batch_order_and_stand_together_by_whoever_sent_them(batch, replicas):
    cut = partition(batch, replicas)
    total = len(cut.tokens)
    everything = torch.arange(total, dtype=torch.float32)[:, None, None] + torch.tensor([[[0.0, 0.5]]])
    groups = open_groups([LocalBackend(hub) for hub in [LocalHub()] * replicas], {"pcp:0": list(range(replicas))})

    def replica(index):
        exchange = RowExchange(cut, index, CPU)
        mine = everything[torch.from_numpy(cut.tokens[cut.tokens_of(index)])]
        assert exchange.count == len(mine)
        gathered = exchange.gather(groups[index]["pcp:0"], mine)
        assert torch.equal(exchange.in_batch_order(gathered), everything)
        by_replica = gathered.view(replicas, cut.rows_max, 1, 2)
        assert torch.equal(exchange.own(by_replica[index]), mine)

    run_ranks(replicas, replica)


def test_a_replica_without_rows_sends_finite_padding():
    exchange = RowExchange(partition([BatchRow(3, 1, 1), BatchRow(4, 1, 1)], 2), 0, CPU)
    assert exchange.padded(torch.empty(0, 3, dtype=torch.bfloat16)).tolist() == [[0.0] * 3] * 2


def held(layout: Layout, member: int, offset: int, length: int, first_block: int) -> KvRow:
    shard = layout.shard_on(member, offset)
    table = torch.arange(first_block, first_block + layout.blocks_needed(shard, length))
    return KvRow(length, 2, shard, offset, table)


@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("members", [2, 3])
def test_c1_gathers_bring_every_cached_token_once_and_only_those(members, interleave):
    """Rows 1 and 3 of a step have context; a gather holds two runs of each shard."""
    layout = Layout(members, interleave, 4)
    lengths = {1: 21, 3: 5, 4: 16 * members}
    row_bytes = 10
    tokens = {}  # slot of a member → (row, position)
    gathers = []
    for member in range(members):
        rows = [(index, held(layout, member, index % members, length, 50 * index)) for index, length in lengths.items()]
        for index, row in rows:
            slots = layout.slots(row.shard, row.block_table.numpy(), np.arange(row.start))
            tokens |= {(member, slot): (index, p) for p, slot in enumerate(slots.tolist()) if slot != NOT_MINE}
        rows = [(0, held(layout, member, 0, 0, 0)), *rows]
        gathers.append(context_gathers(rows, {1, 4}, layout, row_bytes, 2 * interleave * members * row_bytes, CPU))
    assert len({len(each) for each in gathers}) == 1
    seen = {1: [], 4: []}
    for pieces in zip(*gathers, strict=True):
        assert len({len(piece.slots) for piece in pieces}) == 1
        assert len(pieces[0].slots) <= 2 * interleave
        places = torch.arange(members * len(pieces[0].slots))
        brought = [(member, int(slot)) for member, piece in enumerate(pieces) for slot in piece.slots]
        for piece in pieces:
            assert [use.row for use in piece.uses] == [use.row for use in pieces[0].uses]
            for use, first in zip(piece.uses, pieces[0].uses, strict=True):
                assert torch.equal(use.out_of(places), first.out_of(places))
        for use in pieces[0].uses:
            seen[use.row] += [tokens[brought[key]] for key in use.out_of(places).tolist()]
    for index, found in seen.items():
        assert sorted(found) == [(index, position) for position in range(lengths[index])]


@pytest.mark.parametrize(("length", "together"), [(16, True), (13, True), (9, False), (1, True)])
def test_keys_without_padding_between_them_are_not_copied(length, together):
    """Of N·I = 8: 13 leaves padding behind the last shard's keys only, 9 leaves some behind the first one's."""
    layout = Layout(2, 4, 4)
    (piece,) = context_gathers([(0, held(layout, 0, 0, length, 0))], {0}, layout, 8, 1 << 20, CPU)
    assert (len(piece.uses[0].keys) == 1) == together
    assert len(piece.uses[0].out_of(torch.arange(2 * len(piece.slots)))) == length


@pytest.mark.parametrize("batch", BATCHES, ids=len)
@pytest.mark.parametrize("replicas", [2, 3])
def test_queries_in_gather_order_are_those_of_each_member_and_surplus(batch, replicas):
    layout = Layout(2, 2, 4)
    cut = partition(batch, replicas)
    rows = [held(layout, 1, 0, row.computed, 10 * index) for index, row in enumerate(batch)]
    rows = [
        replace(row, block_table=torch.arange(50 * i, 50 * i + 9), count=b.scheduled)
        for i, (row, b) in enumerate(zip(rows, batch, strict=True))
    ]
    members = owned(cut, 0).answered
    gathered = gathered_batch(rows, members, layout, CPU)
    width = cut.rows_max
    assert len(gathered.slots) == len(gathered.visible) == replicas * width
    found = iter(gathered.rows)
    for member, spans in enumerate(members):
        alone = attention_batch(rows, spans, layout, CPU)
        begin, end = member * width, member * width + int(cut.counts[member])
        assert torch.equal(gathered.slots[begin:end], alone.slots)
        assert torch.equal(gathered.visible[begin:end], alone.visible)
        assert (gathered.slots[end : begin + width] == NOT_MINE).all() and not gathered.visible[end : begin + width].any()
        for row in alone.rows:
            there = next(found)
            assert there.q_start == begin + row.q_start
            assert (there.q_len, there.local_len, there.first_visible) == (row.q_len, row.local_len, row.first_visible)
    assert next(found, None) is None


def test_c3_nothing_is_gathered_without_context():
    layout = Layout(2, 2, 4)
    assert context_gathers([(0, held(layout, 0, 0, 0, 0))], {0}, layout, 8, 1 << 20, CPU) == ()


def test_a_workspace_below_one_run_of_every_shard_brings_one_run():
    layout = Layout(2, 4, 4)
    pieces = context_gathers([(0, held(layout, 1, 0, 9, 0))], set(), layout, 8, 1, CPU)
    assert [len(piece.slots) for piece in pieces] == [4, 4]
