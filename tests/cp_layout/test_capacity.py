import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_layout.capacity import blocks_by_member, fits_ever, group_capacity_tokens, roomiest_offset
from cp_layout.errors import LayoutError
from cp_layout.interleave import Layout
from tests.cp_layout.dealing import deal, small_layouts


@pytest.mark.parametrize("layout", small_layouts(), ids=str)
def test_blocks_by_member_are_the_shards_blocks_turned_by_the_offset(layout: Layout) -> None:
    for length in (0, 1, layout.block_size, layout.block_size + 1, layout.virtual_block_size + 1):
        held = [len({local // layout.block_size for local in range(len(hand))}) for hand in deal(layout, length)]
        for offset in range(layout.num_shards):
            turned = held[layout.num_shards - offset :] + held[: layout.num_shards - offset]
            assert blocks_by_member(layout, length, offset) == turned


@pytest.mark.parametrize("layout", small_layouts(), ids=str)
def test_g1_longest_request_that_ever_fits(layout: Layout) -> None:
    for blocks in (0, 1, 3):
        longest = group_capacity_tokens(layout, blocks)
        assert fits_ever(layout, longest, blocks)
        assert not fits_ever(layout, longest + 1, blocks)


def test_a_member_without_a_token_of_the_last_virtual_block_gives_no_block() -> None:
    assert blocks_by_member(Layout(8, 128, 128), 500, 0) == [1, 1, 1, 1, 0, 0, 0, 0]
    assert blocks_by_member(Layout(8, 128, 128), 500, 6) == [1, 1, 0, 0, 0, 0, 1, 1]


def test_roomiest_offset_examples() -> None:
    layout = Layout(4, 16, 16)
    assert roomiest_offset(layout, 20, [5, 5, 5, 5]) == 0
    assert roomiest_offset(layout, 20, [4, 4, 5, 5]) == 2
    assert roomiest_offset(layout, 20, [4, 5, 5, 4]) == 1
    assert roomiest_offset(layout, 20, [5, 4, 4, 5]) == 3
    assert roomiest_offset(layout, 64, [5, 4, 4, 5]) == 0
    assert roomiest_offset(Layout(1, 16, 16), 64, [0]) == 0


def test_roomiest_offset_refuses_pools_that_are_not_the_members() -> None:
    with pytest.raises(LayoutError, match="3 members have a pool, but the layout has 4 KV shards"):
        roomiest_offset(Layout(4, 16, 16), 20, [5, 5, 5])


@given(st.integers(1, 8), st.integers(0, 200), st.data())
def test_roomiest_offset_leaves_the_most_on_the_fullest_member(cp: int, length: int, data: st.DataObject) -> None:
    layout = Layout(cp, 4, 4)
    free = data.draw(st.lists(st.integers(0, 30), min_size=cp, max_size=cp))

    def left(offset: int) -> int:
        return min(f - n for f, n in zip(free, blocks_by_member(layout, length, offset), strict=True))

    best = roomiest_offset(layout, length, free)
    assert left(best) == max(left(offset) for offset in range(cp))
    assert all(left(offset) < left(best) for offset in range(best))


def packed_tokens(layout: Layout, lengths: list[int], blocks_per_member: int, *, choose: bool = True) -> int:
    """Tokens that the pools hold when requests are placed one after another until the first that finds no room."""
    free, tokens = [blocks_per_member] * layout.num_shards, 0
    for length in lengths:
        offset = roomiest_offset(layout, length, free) if choose else 0
        free = [f - n for f, n in zip(free, blocks_by_member(layout, length, offset), strict=True)]
        if min(free) < 0:
            return tokens
        tokens += length
    raise AssertionError("the stream of requests was too short to fill the pools")


def capacity_ratio(layout: Layout, lengths: list[int], blocks_per_member: int) -> float:
    one = Layout(1, layout.interleave, layout.block_size)
    return packed_tokens(layout, lengths, blocks_per_member) / packed_tokens(one, lengths, blocks_per_member)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("whole", [True, False], ids=["il=B", "il=1"])
@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_g7_long_requests_use_every_shard(cp: int, whole: bool, block_size: int) -> None:
    layout = Layout(cp, block_size if whole else 1, block_size)
    v = layout.virtual_block_size
    draw = random.Random(20)
    lengths = [draw.randint(64 * v, 80 * v) for _ in range(700)]
    assert capacity_ratio(layout, lengths, 40_000) >= 0.98 * cp


@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_g7_short_requests_use_every_shard_when_the_offset_is_roomiest(cp: int, block_size: int) -> None:
    layout = Layout(cp, block_size, block_size)
    draw = random.Random(21)
    lengths = [draw.randint(1, 12 * block_size) for _ in range(8000)]
    assert capacity_ratio(layout, lengths, 4_000) >= 0.93 * cp


def test_without_an_offset_half_of_the_pool_is_unusable() -> None:
    layout = Layout(8, 128, 128)
    requests = [500] * 200
    assert packed_tokens(layout, requests, 50, choose=False) == 50 * 500
    assert packed_tokens(layout, requests, 50) == 100 * 500
