"""The partition against a loop that deals tokens one by one, against golden vectors, and by its laws."""

import json
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_layout.errors import LayoutError
from cp_layout.zigzag import PADDING, BatchRow, Partition, partition

Piece = tuple[int, int, int]

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "layout_vectors.json").read_text(encoding="utf-8")
)["pcp_partition"]


def naive(rows: list[BatchRow], p: int) -> list[list[tuple[int, int]]]:
    """Per member, (row, position) of its tokens in order: tokens are dealt one by one."""
    hands: list[list[tuple[int, int]]] = [[] for _ in range(p)]

    def pairs(member: int) -> int:
        return sum(position + 1 for _, position in hands[member])

    for index, row in enumerate(rows):
        tokens = [(index, row.computed + i) for i in range(row.scheduled)]
        if row.owner is not None:
            hands[row.owner] += tokens
        elif row.scheduled < 2 * p:
            hands[min(range(p), key=lambda member: (pairs(member), member))] += tokens
        else:
            size = (row.scheduled + 2 * p - 1) // (2 * p)
            for i, token in enumerate(tokens):
                hands[min(i // size, 2 * p - 1 - i // size)].append(token)
    return hands


def pieces(cut: Partition, member: int) -> list[Piece]:
    part = cut.pieces_of(member)
    triples = zip(cut.piece_row[part], cut.piece_start[part], cut.piece_length[part], strict=True)
    return [(int(row), int(start), int(length)) for row, start, length in triples]


def expand(runs: list[Piece]) -> list[tuple[int, int]]:
    return [(row, start + i) for row, start, length in runs for i in range(length)]


def check(rows: list[BatchRow], p: int) -> Partition:
    cut = partition(rows, p)
    hands = naive(rows, p)
    number = {token: g for g, token in enumerate((i, r.computed + k) for i, r in enumerate(rows) for k in range(r.scheduled))}
    assert cut.num_members == p
    for member, hand in enumerate(hands):
        runs = pieces(cut, member)
        assert expand(runs) == hand
        assert all(a[0] < b[0] or a[1] + a[2] < b[1] for a, b in pairwise(runs)), "pieces could be one"
        mine = cut.tokens_of(member)
        assert cut.positions[mine].tolist() == [position for _, position in hand]
        assert cut.tokens[mine].tolist() == [number[token] for token in hand]
        assert cut.pairs[member] == sum(position + 1 for _, position in hand)
    dealt = [token for hand in hands for token in hand]
    assert cut.restore.tolist() == [dealt.index(token) for token in number]
    assert cut.counts.tolist() == [len(hand) for hand in hands]
    assert cut.rows_max == max(map(len, hands))
    assert cut.holder.tolist() == [next(m for m, hand in enumerate(hands) if token in hand) for token in number]
    padded = [hand + [None] * (cut.rows_max - len(hand)) for hand in hands]
    flat = [token for hand in padded for token in hand]
    assert cut.restore_padded.tolist() == [flat.index(token) for token in number]
    assert cut.padded_tokens.tolist() == [[PADDING if token is None else number[token] for token in hand] for hand in padded]
    ends = [(i, row.computed + row.scheduled - 1) for i, row in enumerate(rows)]
    assert cut.last_holder.tolist() == [next(m for m, hand in enumerate(hands) if end in hand) for end in ends]
    return cut


@pytest.mark.parametrize("p", range(1, 6))
def test_d1_d4_one_row_of_every_length_and_context(p: int) -> None:
    for computed, scheduled in product((0, 1, 5, 9), range(1, 6 * p + 2)):
        check([BatchRow(computed, scheduled)], p)


@pytest.mark.parametrize("p", (1, 2, 3, 4))
def test_d4_batches_are_cut_row_by_row(p: int) -> None:
    for lengths in ((3, 8, 5), (1, 1, 1, 1), (17, 1, 9, 1), (1, 2, 3, 4, 5, 6, 7, 8, 9)):
        for contexts in ((0,), (4, 7, 0, 2)):
            check([BatchRow(contexts[i % len(contexts)], length) for i, length in enumerate(lengths)], p)


@pytest.mark.parametrize("p", (1, 2, 3))
def test_every_small_batch_of_two_with_and_without_owners(p: int) -> None:
    kinds = [BatchRow(c, q, owner) for c in (0, 3) for q in (1, 2, 2 * p, 2 * p + 1) for owner in (None, *range(p))]
    for first, second in product(kinds, kinds):
        check([first, second], p)


def test_d7_positions_of_the_members() -> None:
    cut = partition([BatchRow(0, 8)], 2)
    assert [cut.positions[cut.tokens_of(m)].tolist() for m in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    cut = partition([BatchRow(5, 8)], 2)
    assert [cut.positions[cut.tokens_of(m)].tolist() for m in (0, 1)] == [[5, 6, 11, 12], [7, 8, 9, 10]]


def test_d2_a_prefill_of_one_token_goes_to_the_lightest_and_a_decode_row_to_its_owner() -> None:
    cut = partition([BatchRow(9, 1, owner=0), BatchRow(0, 1), BatchRow(0, 1), BatchRow(2, 1, owner=0)], 2)
    assert [pieces(cut, m) for m in (0, 1)] == [[(0, 9, 1), (3, 2, 1)], [(1, 0, 1), (2, 0, 1)]]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['scheduled']}-pcp{case['pcp']}-dcp{case['dcp']}")
def test_rows_that_are_split_are_split_as_elsewhere(case: dict[str, Any]) -> None:
    rows = [BatchRow(c, q) for c, q in zip(case["computed"], case["scheduled"], strict=True)]
    cut = partition(rows, case["pcp"])
    split = [row for row, replicated in enumerate(case["replicated"]) if not replicated]
    for member, theirs in enumerate(case["ranks"]):
        ours = [token for token in expand(pieces(cut, member)) if token[0] in split]
        assert ours == [token for token in expand(theirs["rows"]) if token[0] in split]


def batches(max_rows: int = 8) -> st.SearchStrategy[tuple[int, list[BatchRow]]]:
    def rows(p: int) -> st.SearchStrategy[tuple[int, list[BatchRow]]]:
        owner = st.none() | st.integers(0, p - 1)
        row = st.builds(BatchRow, st.integers(0, 2**40), st.integers(1, 300), owner)
        return st.tuples(st.just(p), st.lists(row, max_size=max_rows))

    return st.integers(1, 9).flatmap(rows)


@given(batches())
def test_every_token_is_computed_once_and_comes_back_to_its_place(batch: tuple[int, list[BatchRow]]) -> None:
    p, rows = batch
    cut = partition(rows, p)
    total = sum(row.scheduled for row in rows)
    everything = np.array([row.computed + i for row in rows for i in range(row.scheduled)], dtype=np.int64)
    assert cut.positions[cut.restore].tolist() == everything.tolist()
    assert np.sort(cut.tokens).tolist() == list(range(total))
    gathered = np.full(p * cut.rows_max, -5, dtype=np.int64)
    for member in range(p):
        mine = cut.positions[cut.tokens_of(member)]
        gathered[member * cut.rows_max :][: len(mine)] = mine
    assert gathered[cut.restore_padded].tolist() == everything.tolist()
    assert int(cut.pairs.sum()) == sum(int(position) + 1 for position in everything)
    for index, row in enumerate(rows):
        if row.owner is not None:
            assert set(cut.holder[cut.first_of_row[index] : cut.first_of_row[index + 1]]) == {row.owner}


@given(st.integers(1, 16), st.integers(0, 2**40), st.integers(1, 200))
def test_a_row_of_whole_segments_weighs_the_same_on_every_member(p: int, computed: int, size: int) -> None:
    cut = partition([BatchRow(computed, 2 * p * size)], p)
    assert set(cut.pairs.tolist()) == {size * (2 * computed + 2 * p * size + 1)}
    assert set(cut.counts.tolist()) == {2 * size}


@given(batches())
def test_pairs_spread_by_no_more_than_one_row_and_the_missing_ends_of_segments(batch: tuple[int, list[BatchRow]]) -> None:
    p, given_rows = batch
    rows = [BatchRow(row.computed, row.scheduled) for row in given_rows]
    short = [row.scheduled * (row.computed + row.scheduled) for row in rows if row.scheduled < 2 * p]
    missing = 0
    for row in rows:
        if row.scheduled >= 2 * p:
            size = -(-row.scheduled // (2 * p))
            missing += min(2 * p - 1, size) * (row.computed + 2 * p * size)
    cut = partition(rows, p)
    assert int(cut.pairs.max() - cut.pairs.min()) <= max(short, default=0) + missing


@given(batches(), st.randoms(use_true_random=False))
def test_a_part_of_the_rows_keeps_its_members_and_counts_its_own_tokens(batch: tuple[int, list[BatchRow]], random: Any) -> None:
    p, rows = batch
    whole = partition(rows, p)
    keep = np.array([random.random() < 0.5 for _ in rows], dtype=bool)
    part = whole.only(keep)
    for member in range(p):
        assert pieces(part, member) == [piece for piece in pieces(whole, member) if keep[piece[0]]]
    kept = [row.computed + i for row, kept in zip(rows, keep, strict=True) if kept for i in range(row.scheduled)]
    assert part.positions[part.restore].tolist() == kept
    assert part.last_holder.tolist() == [
        int(member) if kept else PADDING for member, kept in zip(whole.last_holder, keep, strict=True)
    ]


def test_no_rows_are_nothing_for_everybody() -> None:
    cut = partition([], 3)
    assert (cut.rows_max, cut.counts.tolist(), cut.pairs.tolist()) == (0, [0, 0, 0], [0, 0, 0])
    assert cut.padded_tokens.shape == (3, 0)
    assert cut.last_holder.tolist() == cut.restore_padded.tolist() == []


@pytest.mark.parametrize("computed, scheduled", [(-1, 3), (0, 0), (4, -2)])
def test_a_row_that_is_none_is_refused(computed: int, scheduled: int) -> None:
    with pytest.raises(LayoutError, match=f"got {scheduled} after {computed}"):
        BatchRow(computed, scheduled)


@pytest.mark.parametrize("owner, members", [(-1, "count from 0"), (-2, "count from 0"), (2, "are 0 to 1"), (7, "are 0 to 1")])
def test_an_owner_that_is_no_member_is_refused(owner: int, members: str) -> None:
    with pytest.raises(LayoutError, match=f"owned by member {owner}, (the )?members {members}"):
        partition([BatchRow(0, 1, owner)], 2)


def test_a_batch_is_cut_over_at_least_one_member() -> None:
    with pytest.raises(LayoutError, match="got 0"):
        partition([BatchRow(0, 1)], 0)
