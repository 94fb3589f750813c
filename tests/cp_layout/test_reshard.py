"""Resharding against a naive reading of the laws: every token of every head arrives once, in its place, and nowhere else."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_layout.errors import LayoutError
from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.laws import legal_shapes
from cp_layout.reshard import Reshard, Runs, Side, reshard, token_runs
from tests.layout_pairs import layouts, lengths

NOTHING = -1


def sides(kv_heads: int | None, interleave: int | None, block_size: int, tps: tuple[int, ...] = (1, 2, 4)) -> list[Side]:
    """Every legal (tp, pcp, dcp) with N = dcp in 1, 2, 4, or 3 where tp is 3."""
    heads = kv_heads or 1
    found = []
    for tp, pcp, dcp in legal_shapes(16, 12 * heads, heads, mla=kv_heads is None):
        if tp in tps and pcp <= 4 and dcp in (1, 2, 3, 4):
            layout = Layout(dcp, interleave or block_size, block_size)
            found.append(Side(Grid(tp, pcp, dcp), layout, kv_heads, shard_offset=(tp + pcp) % dcp))
    return found


def shuffled_table(columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(columns + 2)[:columns] + 1


def pool_of(side: Side, rank: int, length: int, filled: bool) -> tuple[np.ndarray, np.ndarray]:
    """A rank's pool [slots, heads] of values head·10⁶ + token, NOTHING elsewhere, and its block table."""
    shard, heads = side.shard_of(rank), side.heads_of(rank)
    columns = side.layout.virtual_blocks(length)
    table = shuffled_table(columns, rank)
    pool = np.full(((columns + 3) * side.layout.block_size, len(heads)), NOTHING)
    if filled:
        tokens = np.arange(length)
        slots = side.layout.slots(shard, table, tokens)
        mine = slots >= 0
        pool[slots[mine]] = tokens[mine, None] + np.array(heads) * 1_000_000
    return pool, table


def check_moves(source: Side, target: Side, start: int, end: int, plan: Reshard | None = None) -> None:
    plan = plan or reshard(source, target, start, end)
    sources = [pool_of(source, rank, end, True) for rank in range(source.grid.world_size)]
    written = [np.zeros(pool_of(target, rank, end, False)[0].shape, int) for rank in range(target.grid.world_size)]
    pools = [pool_of(target, rank, end, False) for rank in range(target.grid.world_size)]
    for link in plan.links:
        runs = plan.runs_of(link)
        there = runs.src_slots(sources[link.src][1], source.layout.block_size)
        here = runs.dst_slots(pools[link.dst][1], target.layout.block_size)
        src_heads = slice(link.src_head, link.src_head + link.num_heads)
        dst_heads = slice(link.dst_head, link.dst_head + link.num_heads)
        pools[link.dst][0][here, dst_heads] = sources[link.src][0][there, src_heads]
        np.add.at(written[link.dst], (here, dst_heads), 1)
    for rank, (pool, _) in enumerate(pools):
        wanted = pool_of(target, rank, end, True)[0]
        wanted[(wanted != NOTHING) & (wanted % 1_000_000 < start)] = NOTHING
        np.testing.assert_array_equal(pool, wanted)
        np.testing.assert_array_equal(written[rank], wanted != NOTHING)
    assert plan.head_tokens == (end - start) * target.heads * target.copies
    for runs in plan.runs.values():
        check_runs(runs, source.layout, target.layout)


def check_runs(runs: Runs, source: Layout, target: Layout) -> None:
    """Runs are not empty, stay in their block on both sides, and could not be longer."""
    assert len(runs) > 0 and (runs.count > 0).all()
    assert (runs.src_offset + runs.count <= source.block_size).all()
    assert (runs.dst_offset + runs.count <= target.block_size).all()
    src = runs.src_column * source.block_size + runs.src_offset
    dst = runs.dst_column * target.block_size + runs.dst_offset
    joined = (src[:-1] + runs.count[:-1] == src[1:]) & (dst[:-1] + runs.count[:-1] == dst[1:])
    assert not (joined & (runs.src_offset[1:] > 0) & (runs.dst_offset[1:] > 0)).any()


def shape_of(side: Side) -> str:
    grid, layout = side.grid, side.layout
    return f"tp{grid.tp}-pcp{grid.pcp}-N{layout.num_shards}-I{layout.interleave}-B{layout.block_size}"


@pytest.mark.parametrize("target", layouts(), ids=str)
@pytest.mark.parametrize("source", layouts(), ids=str)
def test_h13_every_pair_of_layouts_moves_every_token_once(source: Layout, target: Layout) -> None:
    ends = [Side(Grid(pcp=layout.num_shards, dcp=layout.num_shards), layout, 1) for layout in (source, target)]
    for length in lengths(source.virtual_block_size, target.virtual_block_size):
        check_moves(*ends, 0, length)
    for start in (1, source.block_size, target.virtual_block_size):
        check_moves(*ends, start, start + source.virtual_block_size + 1)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, None])
def test_h14_every_pair_of_head_splits_moves_every_head_once(kv_heads: int | None) -> None:
    for source, target in itertools.product(sides(kv_heads, 2, 4), sides(kv_heads, None, 8)):
        check_moves(source, target, 0, source.layout.virtual_block_size + 1)


def test_h14_three_heads_over_one_and_three_ranks() -> None:
    for source, target in itertools.product(sides(3, 1, 4, (1, 3)), sides(3, None, 4, (1, 3))):
        check_moves(source, target, 0, source.layout.virtual_block_size + 1)


@pytest.mark.sweep
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 3])
def test_h13_h14_the_full_product(kv_heads: int) -> None:
    tps = (1, 3) if kv_heads == 3 else (1, 2, 4)
    options = [side for block in (4, 16) for interleave in (1, 2, block) for side in sides(kv_heads, interleave, block, tps)]
    for number, (source, target) in enumerate(itertools.product(options, options)):
        # Every pair with one length; neighbours, which differ little, with another one each.
        sizes = (*lengths(source.layout.virtual_block_size), 2 * target.layout.virtual_block_size + 1)
        check_moves(source, target, 0, sizes[number % len(sizes)])


@given(st.data())
def test_ranges_that_meet_move_what_their_union_moves(data: st.DataObject) -> None:
    source, target = (data.draw(st.sampled_from(layouts())) for _ in range(2))
    cuts = sorted(data.draw(st.lists(st.integers(0, 150), min_size=3, max_size=3)))
    whole = moved_slots(source, target, cuts[0], cuts[2])
    parts = [moved_slots(source, target, low, high) for low, high in itertools.pairwise(cuts)]
    assert set.union(*parts) == whole
    assert sum(map(len, parts)) == len(whole) == cuts[2] - cuts[0]


def moved_slots(source: Layout, target: Layout, start: int, end: int) -> set[tuple[int, int, int, int]]:
    table = np.arange(200)
    return {
        (src, int(there), dst, int(here))
        for (src, dst), runs in token_runs(source, target, start, end).items()
        for there, here in zip(runs.src_slots(table, source.block_size), runs.dst_slots(table, target.block_size), strict=True)
    }


def test_one_layout_on_both_sides_moves_whole_blocks() -> None:
    for interleave in (1, 2, 16):
        layout = Layout(4, interleave, 16)
        runs = token_runs(layout, layout, 0, 4 * 16 * 3)
        assert sorted(runs) == [(shard, shard) for shard in range(4)]
        assert all(part.count.tolist() == [16, 16, 16] for part in runs.values())


def test_an_interleave_of_one_on_one_side_makes_a_run_per_token() -> None:
    runs = token_runs(Layout(4, 1, 16), Layout(1, 16, 16), 0, 64)
    assert sum(map(len, runs.values())) == 64


def test_copies_share_the_work() -> None:
    source = Side(Grid(tp=4), Layout(1, 4, 4), 1)
    target = Side(Grid(pcp=4, dcp=4), Layout(4, 4, 4), 1)
    assert source.copies == 4 and target.copies == 1
    assert [(link.src, link.dst) for link in reshard(source, target, 0, 16).links] == [(0, 0), (1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize(
    ("grid", "kv_heads", "copies"),
    [
        (Grid(tp=4), 1, 4),
        (Grid(tp=4, dcp=2), 1, 2),
        (Grid(tp=4, dcp=2), 2, 1),
        (Grid(tp=2), 4, 1),
        (Grid(tp=2, pcp=2), 2, 2),
        (Grid(tp=4, pcp=2, dcp=4), 2, 1),
        (Grid(tp=4, dcp=2), None, 2),
    ],
    ids=str,
)
def test_copies(grid: Grid, kv_heads: int | None, copies: int) -> None:
    side = Side(grid, Layout(grid.dcp, 4, 4), kv_heads)
    assert side.copies == copies
    assert {len(side.holders(shard, head)) for shard in range(grid.dcp) for head in range(side.heads)} == {copies}


def test_nothing_moves_of_an_empty_range() -> None:
    side = Side(Grid(), Layout(1, 4, 4), 2)
    plan = reshard(side, side, 7, 7)
    assert (plan.links, plan.runs, plan.head_tokens) == ((), {}, 0)


def test_a_source_shard_without_tokens_has_no_link() -> None:
    source = Side(Grid(pcp=4, dcp=4), Layout(4, 16, 16), 1)
    target = Side(Grid(), Layout(1, 16, 16), 1)
    assert [(link.src, link.dst) for link in reshard(source, target, 0, 17).links] == [(0, 0), (1, 0)]


def test_a_table_may_begin_at_the_first_column_that_the_runs_need() -> None:
    runs = token_runs(Layout(2, 2, 4), Layout(1, 4, 4), 21, 60)[1, 0]
    source, target = np.arange(50, 70), np.arange(20, 40)
    assert (runs.src_columns.start, runs.src_columns.stop) == (2, 8)
    np.testing.assert_array_equal(runs.src_slots(source[2:8], 4, 2), runs.src_slots(source, 4))
    np.testing.assert_array_equal(runs.dst_slots(target[5:], 4, 5), runs.dst_slots(target, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: reshard(Side(Grid(), Layout(1, 4, 4), 2), Side(Grid(), Layout(1, 4, 4), 4), 0, 4), "2 KV heads.*4 KV heads"),
        (lambda: reshard(Side(Grid(), Layout(1, 4, 4), 1), Side(Grid(), Layout(1, 4, 4), None), 0, 4), "a latent head"),
        (lambda: token_runs(Layout(1, 4, 4), Layout(1, 4, 4), 5, 4), r"tokens \[5, 4\) are not a range"),
        (lambda: token_runs(Layout(1, 4, 4), Layout(1, 4, 4), -1, 4), r"tokens \[-1, 4\) are not a range"),
        (lambda: Side(Grid(dp=2), Layout(1, 4, 4), 1), "one DP index, the grid has 2"),
        (lambda: Side(Grid(pcp=2, dcp=2), Layout(2, 4, 4), 1, 2), "shard offset 2 does not exist with 2"),
        (lambda: Side(Grid(pcp=2, dcp=2), Layout(1, 4, 4), 1), "1 KV shards, but dcp is 2"),
        (lambda: Side(Grid(tp=4, dcp=4), Layout(4, 4, 4), 2), "TP/KVH must be a multiple of d"),
        (
            lambda: token_runs(Layout(1, 4, 4), Layout(1, 4, 4), 0, 5)[0, 0].src_slots(np.arange(1), 4),
            "block table has 1 columns, the runs need 2",
        ),
        (
            lambda: token_runs(Layout(1, 4, 4), Layout(1, 4, 4), 5, 9)[0, 0].dst_slots(np.arange(9), 4, 3),
            "the block table begins 2 columns after the first one that the runs need",
        ),
    ],
)
def test_refusals_name_the_numbers(make, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LayoutError, match=message):
        make()
