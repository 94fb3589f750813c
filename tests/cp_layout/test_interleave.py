import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_layout.errors import LayoutError
from cp_layout.interleave import NOT_MINE, Layout
from tests.cp_layout.dealing import deal, small_layouts


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    interleave = draw(st.integers(1, 64))
    return Layout(draw(st.integers(1, 40)), interleave, interleave * draw(st.integers(1, 16)))


@pytest.mark.parametrize("layout", small_layouts(), ids=str)
def test_a2_every_function_agrees_with_dealing_cards(layout: Layout) -> None:
    longest = 3 * layout.virtual_block_size + layout.interleave + 1
    hands = deal(layout, longest)
    table = np.array([3 * c + 1 for c in range(longest)])  # ids that are neither zero, nor contiguous
    positions = np.arange(longest)
    for shard, hand in enumerate(hands):
        slots = layout.slots(shard, table, positions)
        assert np.flatnonzero(slots != NOT_MINE).tolist() == hand
        for local, position in enumerate(hand):
            column, offset = divmod(local, layout.block_size)
            assert layout.owner(position) == shard
            assert layout.local_index(position) == local
            assert (layout.block_column(position), layout.block_offset(position)) == (column, offset)
            assert slots[position] == table[column] * layout.block_size + offset


@pytest.mark.parametrize("layout", small_layouts(), ids=str)
def test_a7_local_lens_of_every_length_agree_with_dealing_cards(layout: Layout) -> None:
    lengths = np.arange(3 * layout.virtual_block_size + layout.interleave + 1)
    hands = deal(layout, len(lengths))
    columns = [layout.local_lens_at(shard, lengths).tolist() for shard in range(layout.num_shards)]
    for length in lengths.tolist():
        expected = [sum(position < length for position in hand) for hand in hands]
        assert layout.local_lens(length) == expected
        assert [column[length] for column in columns] == expected
        blocks = [layout.blocks_needed(shard, length) for shard in range(layout.num_shards)]
        assert blocks == [len({p // layout.block_size for p in range(held)}) for held in expected]
        assert layout.virtual_blocks(length) == max(blocks)


@given(layouts(), st.integers(0, 2**40))
def test_local_lens_sum_to_the_length_and_differ_by_at_most_the_interleave(layout: Layout, length: int) -> None:
    lens = layout.local_lens(length)
    assert sum(lens) == length
    assert all(0 <= held <= length for held in lens)
    if layout.num_shards > 1:
        assert max(lens) - min(lens) <= layout.interleave
    assert lens == sorted(lens, reverse=True) or layout.num_shards == 1


@given(layouts(), st.integers(0, 2**40))
def test_position_is_the_next_token_of_its_owner(layout: Layout, position: int) -> None:
    owner = layout.owner(position)
    before, after = layout.local_lens(position), layout.local_lens(position + 1)
    assert layout.local_index(position) == before[owner]
    assert [b - a for a, b in zip(before, after, strict=True)] == [int(r == owner) for r in range(layout.num_shards)]
    assert layout.block_column(position) * layout.block_size + layout.block_offset(position) == before[owner]


@given(layouts(), st.integers(0, 500))
def test_blocks_of_a_virtual_block_hold_the_same_tokens(layout: Layout, g: int) -> None:
    first = g * layout.virtual_block_size
    assert {layout.block_column(p) for p in range(first, first + layout.virtual_block_size)} == {g}


@given(layouts(), st.integers(0, 300), st.integers(0, 300))
def test_columns_of_a_range_are_those_of_its_tokens(layout: Layout, start: int, count: int) -> None:
    for shard in range(layout.num_shards):
        mine = [layout.block_column(p) for p in range(start, start + count) if layout.owner(p) == shard]
        assert list(layout.columns(shard, start, start + count)) == sorted(set(mine))


@given(st.integers(1, 8), st.integers(1, 16), st.integers(0, 300))
def test_whole_blocks_when_interleave_is_the_block_size(n: int, b: int, g: int) -> None:
    layout = Layout(n, b, b)
    assert {layout.owner(p) for p in range(g * b, (g + 1) * b)} == {g % n}


def test_a2_who_owns_token_5() -> None:
    answers = {interleave: Layout(2, interleave, 8).owner(5) for interleave in (4, 1, 8)}
    assert answers == {4: 1, 1: 1, 8: 0}
    for interleave, owner in answers.items():
        layout = Layout(2, interleave, 8)
        assert [int(layout.slots(r, np.array([9]), np.array([5]))[0] != NOT_MINE) for r in range(2)] == [1 - owner, owner]
        assert layout.local_lens(6)[owner] == layout.local_lens(5)[owner] + 1


def test_a1_a_cache_that_is_not_sharded_is_the_layout_with_one_shard() -> None:
    positions = np.arange(5)
    assert Layout(1, 1, 8).slots(0, np.array([0]), positions).tolist() == [0, 1, 2, 3, 4]
    sharded = [Layout(2, 1, 8).slots(shard, np.array([0]), positions) for shard in range(2)]
    assert [int((slots != NOT_MINE).sum()) for slots in sharded] == [3, 2]


@pytest.mark.parametrize("interleave", [1, 2, 8])
@pytest.mark.parametrize("num_shards", [2, 3, 4])
def test_a6_decode_tokens_spread_over_all_shards(num_shards: int, interleave: int) -> None:
    layout = Layout(num_shards, interleave, 8)
    for length in range(1, 1 + 8 * interleave * num_shards + 1):
        held = layout.local_lens(length)
        blocks = [layout.blocks_needed(shard, length) for shard in range(num_shards)]
        assert max(held) - min(held) <= interleave
        assert max(blocks) - min(blocks) <= 1


def test_a7_padding_rows_own_nothing() -> None:
    layout = Layout(2, 2, 4)
    lengths = np.array([9, 0, 0, 0])
    assert [layout.local_lens_at(shard, lengths).tolist() for shard in range(2)] == [[5, 0, 0, 0], [4, 0, 0, 0]]
    assert layout.slots(1, np.array([7]), np.array([-1, 2, -1])).tolist() == [NOT_MINE, 28, NOT_MINE]
    assert layout.slots(0, np.array([7]), np.array([], dtype=np.int64)).tolist() == []


def test_slots_of_a_shard_without_blocks() -> None:
    empty = np.array([], dtype=np.int64)
    assert Layout(2, 4, 4).slots(1, empty, np.array([0, 3])).tolist() == [NOT_MINE, NOT_MINE]
    with pytest.raises(LayoutError, match="block table of shard 1 has 0 columns, a position needs 1"):
        Layout(2, 4, 4).slots(1, empty, np.array([0, 4]))


def test_slots_refuse_a_position_beyond_the_table() -> None:
    with pytest.raises(LayoutError, match="block table of shard 0 has 2 columns, a position needs 3"):
        Layout(2, 2, 4).slots(0, np.array([24, 7]), np.array([20]))
    assert Layout(2, 2, 4).slots(1, np.array([24, 7]), np.array([20])).tolist() == [NOT_MINE]


@pytest.mark.parametrize("length", [-1, -100])
def test_a7_negative_lengths_are_refused(length: int) -> None:
    with pytest.raises(LayoutError, match=f"at least 0, got {length}"):
        Layout(2, 1, 4).local_len(0, length)
    with pytest.raises(LayoutError, match=f"at least 0, got {length}"):
        Layout(2, 1, 4).local_lens_at(0, np.array([3, length]))


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("interleave", [1, 2, 3, 16, 32])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_j3_interleave_must_divide_the_block_size(num_shards: int, interleave: int, block_size: int) -> None:
    if num_shards == 1 or (interleave <= block_size and block_size % interleave == 0):
        layout = Layout(num_shards, interleave, block_size)
        assert layout.virtual_block_size == num_shards * block_size
        return
    with pytest.raises(LayoutError, match=f"interleave size {interleave} must divide block size {block_size} "):
        Layout(num_shards, interleave, block_size)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1), "number of KV shards must be at least 1, got 0"),
        ((1, 0, 1), "interleave size must be at least 1, got 0"),
        ((2, -4, 8), "interleave size must be at least 1, got -4"),
        ((1, 1, 0), "block size must be at least 1, got 0"),
    ],
)
def test_j2_sizes_below_one_are_refused(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout(*sizes)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_shards_and_members_are_inverse_for_every_offset(num_shards: int) -> None:
    layout = Layout(num_shards, 4, 4)
    for offset in range(num_shards):
        members = [layout.member_of(shard, offset) for shard in range(num_shards)]
        assert members == [*range(offset, num_shards), *range(offset)]
        assert [layout.shard_on(member, offset) for member in members] == list(range(num_shards))


@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_slots_by_local_index_are_those_by_position(interleave: int) -> None:
    layout = Layout(3, interleave, 4)
    positions = np.arange(40)
    for shard in range(3):
        table = np.array([7, 2, 9, 4])
        by_position = layout.slots(shard, table, positions)
        mine = by_position[by_position >= 0]
        assert layout.slots_of_local(table, np.arange(len(mine))).tolist() == mine.tolist()
    with pytest.raises(LayoutError, match="the block table has 4 columns, local index 16 lies beyond them"):
        layout.slots_of_local(table, np.arange(17))
