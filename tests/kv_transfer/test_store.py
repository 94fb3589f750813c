"""Rows of a paged pool, for every choice of heads."""

import numpy as np
import pytest

from kv_transfer import store
from kv_transfer.store import ArrayStore, Geometry, pick

SHAPE = (2, 3, 4, 6, 8)


def pool() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 255, SHAPE, np.uint8)


def moved(slots: list[int], first: int, num: int, piece: int) -> None:
    """Reads and writes piece by piece what indexing says."""
    data, at = pool(), np.array(slots)
    store, total = ArrayStore(data), 2 * len(slots)
    picked = pick(store.geometry, at, first, num, piece)
    flat = data.reshape(2, 12, 6, 8)
    wanted = flat[:, at, first : first + num].reshape(total, -1)
    after = data.copy()
    rows = np.random.default_rng(2).integers(0, 255, wanted.shape, np.uint8)
    after.reshape(2, 12, 6, 8)[:, at, first : first + num] = rows.reshape(2, len(slots), num, 8)
    for start in range(0, total, piece):
        part = range(start, min(start + piece, total))
        out = np.empty(len(part) * num * 8, np.uint8)
        store.read(picked, part, out)
        np.testing.assert_array_equal(out.reshape(len(part), -1), wanted[start : part.stop])
        store.write(picked, part, rows[start : part.stop].reshape(-1))
    np.testing.assert_array_equal(data, after)


@pytest.mark.parametrize("direct", [1, 1 << 30], ids=["unit by unit", "by a buffer"])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 0, 1, 2, 3]), ([2, 3, 8, 9], [8, 9, 10, 11]), ([11, 0, 6, 5], [3, 2, 1, 0])],
)
@pytest.mark.parametrize(("first", "to", "num"), [(0, 0, 6), (2, 4, 2), (1, 3, 3)])
def test_copies_what_a_read_and_a_write_would(
    direct: int, theirs: list[int], ours: list[int], first: int, to: int, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "DIRECT_BYTES", direct)
    source, total = ArrayStore(pool()), 2 * len(ours)
    for piece in (4, total):
        copied, written = targets = [ArrayStore(pool() ^ 255) for _ in range(2)]
        there = pick(source.geometry, np.array(theirs), first, num, piece)
        here = pick(copied.geometry, np.array(ours), to, num, piece)
        for start in range(0, total, piece):
            part = range(start, min(start + piece, total))
            copied.copy(here, part, source, there)
            data = np.empty(len(part) * num * 8, np.uint8)
            source.read(there, part, data)
            written.write(here, part, data)
        np.testing.assert_array_equal(*(target._data for target in targets))
        assert not (copied._data == (pool() ^ 255).reshape(-1)).all()


@pytest.mark.parametrize("piece", [1, 3, 8])
@pytest.mark.parametrize(("first", "num"), [(0, 6), (0, 1), (5, 1), (2, 2), (3, 3), (1, 2), (1, 4), (2, 4)])
def test_reads_and_writes_what_indexing_would(first: int, num: int, piece: int) -> None:
    moved([11, 0, 6, 5], first, num, piece)


@pytest.mark.parametrize("piece", [1, 2, 4, 6, 8])
@pytest.mark.parametrize(
    "slots", [[0, 1, 2, 3], [4, 5, 6, 7, 0, 1, 2, 3], [2, 3, 8, 9], [1, 2, 3, 4], [0, 1, 2, 3, 4], [9, 8, 7, 6], [6, 7, 1, 2]]
)
def test_neighbours_that_move_together_end_where_single_rows_would(slots: list[int], piece: int) -> None:
    moved(slots, 0, 6, piece)


@pytest.mark.parametrize("written", [16, 64, 1024], ids=["a third of a row", "a third of four rows", "more"])
def test_neighbours_are_written_in_parts_of_any_size_that_divides_them(written: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "WRITTEN_BYTES", written)
    moved([4, 5, 6, 7, 0, 1, 2, 3], 0, 6, 8)
    moved([9, 8, 7, 6], 2, 2, 3)


@pytest.mark.parametrize(
    ("slots", "piece", "rows"),
    [([0, 1, 2, 3], 4, 4), ([4, 5, 6, 7, 0, 1, 2, 3], 8, 4), ([2, 3, 8, 9], 4, 2), ([1, 2, 3, 4], 4, 1), ([0, 1, 2, 3], 2, 2)],
)
def test_neighbours_move_in_units_as_large_as_blocks_runs_and_pieces_allow(slots: list[int], piece: int, rows: int) -> None:
    assert pick(ArrayStore(pool()).geometry, np.array(slots), 0, 6, piece).unit_bytes == rows * 48


@pytest.mark.parametrize(
    ("slots", "first", "num", "said"),
    [
        ([12], 0, 6, "slots 12 to 12 of a pool of 12"),
        ([-1, 3], 0, 6, "slots -1 to 3 of a pool of 12"),
        ([], 0, 6, "no slots at all"),
        ([0], 5, 2, r"heads \[5, 7\) of a pool of 6"),
        ([0], -1, 2, r"heads \[-1, 1\) of a pool of 6"),
        ([0], 2, 0, r"heads \[2, 2\) of a pool of 6"),
    ],
)
def test_what_the_pool_does_not_have_is_refused(slots: list[int], first: int, num: int, said: str) -> None:
    with pytest.raises(IndexError, match=said):
        pick(ArrayStore(pool()).geometry, np.array(slots, np.int64), first, num)


@pytest.mark.parametrize("rows", [range(7, 9), range(-4, 0), range(2, 8), range(6)])
def test_a_piece_that_was_not_picked_is_refused(rows: range) -> None:
    """Eight rows in two planes, four of which move together."""
    data = pool()
    store = ArrayStore(data)
    picked = pick(store.geometry, np.arange(4), 0, 6, 4)
    for call in (store.read, store.write):
        with pytest.raises(IndexError, match=r"rows \[.*\) of 8"):
            call(picked, rows, np.zeros(len(rows) * 48, np.uint8))
    np.testing.assert_array_equal(data, pool())


def test_arrays_that_are_no_pool_are_refused() -> None:
    for data in (pool().view(np.int8), pool()[0], pool()[:, :, ::2]):
        with pytest.raises(ValueError, match="a pool is a contiguous uint8 array"):
            ArrayStore(data)
    with pytest.raises(ValueError, match="every size must be at least 1"):
        Geometry(1, 0, 1, 1, 1)
