import pytest
import torch

from rank_server.attention.batch import AttentionRow
from rank_server.attention.keys import RowKeys, pieces


@pytest.mark.parametrize("table", [[2, 3, 4, 5], [5, 4, 3, 2], [1, 2, 7, 8, 9, 0], [6], [3, 4, 3, 4]], ids=str)
def test_every_range_of_a_row_lies_at_its_blocks(table: list[int]) -> None:
    k_cache, v_cache = torch.randn(2, 10, 4, 2, 3)
    slots = [block * 4 + offset for block in table for offset in range(4)]
    row = AttentionRow(0, 1, torch.tensor(table), len(slots), len(slots))
    keys = RowKeys(row, k_cache, v_cache)
    for first in range(len(slots)):
        for last in range(first + 1, len(slots) + 1):
            assert torch.equal(keys.read_keys(first, last), k_cache.flatten(0, 1)[slots[first:last]])
            assert torch.equal(keys.read_values(first, last), v_cache.flatten(0, 1)[slots[first:last]])


def test_a_range_within_a_run_of_blocks_is_a_view() -> None:
    k_cache, v_cache = torch.randn(2, 10, 4, 2, 3)
    row = AttentionRow(0, 1, torch.tensor([1, 2, 7, 8, 9, 0]), 24, 24)
    assert row.runs == ([0, 2, 5], [1, 7, 0])
    assert row.runs is row.runs, "found once per step, not once per layer"
    keys = RowKeys(row, k_cache, v_cache)
    for first, last, view in [(0, 8, True), (9, 20, True), (20, 24, True), (7, 9, False), (0, 24, False)]:
        shared = keys.read_keys(first, last).untyped_storage().data_ptr() == k_cache.untyped_storage().data_ptr()
        assert shared == view, (first, last)


def test_a_row_without_blocks_has_no_runs() -> None:
    row = AttentionRow(0, 1, torch.tensor([], dtype=torch.int64), 0, 0)
    assert row.runs == ([], [])


@pytest.mark.parametrize(
    ("first", "last", "size", "wanted"),
    [
        (0, 0, 8, []),
        (0, 10, 8, [(0, 8), (8, 10)]),
        (3, 18, 8, [(3, 8), (8, 16), (16, 18)]),
        (6, 9, 1, [(6, 8), (8, 9)]),
        (5, 7, 100, [(5, 7)]),
    ],
)
def test_pieces_start_at_blocks(first: int, last: int, size: int, wanted: list[tuple[int, int]]) -> None:
    assert list(pieces(first, last, size, 4)) == wanted
