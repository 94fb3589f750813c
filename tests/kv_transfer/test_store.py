"""Rows of a paged pool, for every choice of heads."""

import numpy as np
import pytest

from kv_transfer.store import ArrayStore, Geometry

SHAPE = (2, 3, 4, 6, 8)


def pool() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 255, SHAPE, np.uint8)


@pytest.mark.parametrize(("first", "num"), [(0, 6), (0, 1), (5, 1), (2, 2), (3, 3), (1, 2), (1, 4), (2, 4)])
def test_reads_and_writes_what_indexing_would(first: int, num: int) -> None:
    data, places = pool(), np.array([23, 0, 13, 12])
    store = ArrayStore(data)
    out = np.empty((4, num * 8), np.uint8)
    store.read(places, first, num, out)
    np.testing.assert_array_equal(out, data.reshape(24, 6, 8)[places, first : first + num].reshape(4, -1))
    wanted = data.copy()
    wanted.reshape(24, 6, 8)[places, first : first + num] = 7
    store.write(places, first, num, np.full((4, num * 8), 7, np.uint8))
    np.testing.assert_array_equal(data, wanted)


@pytest.mark.parametrize(
    "places", [[0, 1, 2, 3], [4, 5, 6, 7, 0, 1, 2, 3], [2, 3, 8, 9], [1, 2, 3, 4], [0, 1, 2, 3, 4], [9, 8, 7, 6], [6, 7, 1, 2]]
)
def test_neighbours_that_move_together_end_where_single_rows_would(places: list[int]) -> None:
    data, at = pool(), np.array(places)
    out = np.empty((len(at), 48), np.uint8)
    ArrayStore(data).read(at, 0, 6, out)
    np.testing.assert_array_equal(out, data.reshape(24, 48)[at])
    wanted = data.copy()
    rows = np.random.default_rng(2).integers(0, 255, out.shape, np.uint8)
    wanted.reshape(24, 48)[at] = rows
    ArrayStore(data).write(at, 0, 6, rows)
    np.testing.assert_array_equal(data, wanted)


def test_no_rows_are_nothing() -> None:
    data = pool()
    store, none = ArrayStore(data), np.empty((0, 48), np.uint8)
    store.read(np.arange(0), 0, 6, none)
    store.write(np.arange(0), 0, 6, none)
    np.testing.assert_array_equal(data, pool())


@pytest.mark.parametrize(
    ("places", "first", "num", "said"),
    [
        ([24], 0, 6, "places 24 to 24 of a pool of 24"),
        ([-1, 3], 0, 6, "places -1 to 3 of a pool of 24"),
        ([0], 5, 2, r"heads \[5, 7\) of a pool of 6"),
        ([0], -1, 2, r"heads \[-1, 1\) of a pool of 6"),
        ([0], 2, 0, r"heads \[2, 2\) of a pool of 6"),
    ],
)
def test_what_the_pool_does_not_have_is_refused(places: list[int], first: int, num: int, said: str) -> None:
    data = pool()
    rows = np.zeros((len(places), max(num, 1) * 8), np.uint8)
    for call in (ArrayStore(data).read, ArrayStore(data).write):
        with pytest.raises(IndexError, match=said):
            call(np.array(places), first, num, rows)
    np.testing.assert_array_equal(data, pool())


def test_arrays_that_are_no_pool_are_refused() -> None:
    for data in (pool().view(np.int8), pool()[0], pool()[:, :, ::2]):
        with pytest.raises(ValueError, match="a pool is a contiguous uint8 array"):
            ArrayStore(data)
    with pytest.raises(ValueError, match="every size must be at least 1"):
        Geometry(1, 0, 1, 1, 1)
