import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_layout.errors import LayoutError
from cp_layout.packing import Packing, PlaneIndex

SIZES = st.integers(1, 40)


@given(SIZES, SIZES, SIZES, st.integers(1, 2000))
def test_messages_cover_every_row_once_in_order(planes: int, tokens: int, row: int, message: int) -> None:
    packing = Packing(planes, tokens, row, message)
    rows = [packing.rows(index) for index in range(packing.num_messages)]
    assert [row for part in rows for row in part] == list(range(planes * tokens))
    assert {len(part) for part in rows[:-1]} <= {packing.rows_per_message}
    assert all(len(part) * row <= max(message, row) for part in rows)
    if message % row == 0 and (message // row < 64 or message // row % 64 == 0):
        assert packing.num_messages == -(-packing.total_bytes // message)


def test_messages_are_cut_between_groups_of_rows() -> None:
    assert Packing(60, 1024, 384, 1 << 20).rows_per_message == 2688
    assert Packing(64, 1024, 2048, 1 << 20).rows_per_message == 512
    assert Packing(64, 1024, 20_000, 1 << 20).rows_per_message == 52


@given(st.lists(st.integers(0, 99), min_size=1, max_size=9), st.integers(1, 6), st.data())
def test_an_index_repeats_in_every_plane(one: list[int], planes: int, data: st.DataObject) -> None:
    total = planes * len(one)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    wanted = [plane * 100 + place for plane in range(planes) for place in one][start:stop]
    assert PlaneIndex(np.array(one), 100).at(start, stop).tolist() == wanted


def test_refusals() -> None:
    with pytest.raises(LayoutError, match="every size must be at least 1"):
        Packing(1, 0, 4, 8)
    with pytest.raises(LayoutError, match="message 3 is not one of 3"):
        Packing(2, 3, 4, 8).rows(3)
