import pytest

from cp_layout.errors import LayoutError
from cp_layout.grid import Coords, Grid


def every_grid(tp_max: int = 6, pcp_max: int = 4) -> list[Grid]:
    grids = []
    for tp in range(1, tp_max + 1):
        for pcp in range(1, pcp_max + 1):
            for dcp in range(1, tp * pcp + 1):
                try:
                    grids += [Grid(tp, pcp, dcp), Grid(tp, pcp, dcp, dp=2)]
                except LayoutError:
                    continue
    return grids


@pytest.mark.parametrize(
    ("grid", "tp", "pcp", "dcp"),
    [
        (Grid(4, 1, 2), [[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1], [2, 3]]),
        (Grid(6, 1, 3), [[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[0, 1, 2], [3, 4, 5]]),
        (Grid(2, 2, 2), [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 2], [1, 3]]),
        (Grid(2, 2, 4), [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 2, 1, 3]]),
        (
            Grid(4, 2, 8),
            [[0, 1, 2, 3], [4, 5, 6, 7]],
            [[0, 4], [1, 5], [2, 6], [3, 7]],
            [[0, 4, 1, 5, 2, 6, 3, 7]],
        ),
        (Grid(1, 2, 2, dp=2), [[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
        (Grid(2, 2, 1), [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [2], [1], [3]]),
    ],
    ids=str,
)
def test_d9_groups_of_known_shapes(grid: Grid, tp: list[list[int]], pcp: list[list[int]], dcp: list[list[int]]) -> None:
    assert (grid.tp_groups(), grid.pcp_groups(), grid.dcp_groups()) == (tp, pcp, dcp)


@pytest.mark.parametrize("grid", every_grid(), ids=str)
def test_every_axis_is_a_partition_of_the_ranks(grid: Grid) -> None:
    everyone = list(range(grid.world_size))
    sizes = {"tp": grid.tp, "pcp": grid.pcp, "dcp": grid.dcp, "q": grid.dcp_in_tp}
    axes = {"tp": grid.tp_groups(), "pcp": grid.pcp_groups(), "dcp": grid.dcp_groups(), "q": grid.q_groups()}
    for axis, groups in axes.items():
        assert sorted(rank for group in groups for rank in group) == everyone, axis
        assert {len(group) for group in groups} == {sizes[axis]}, axis


@pytest.mark.parametrize("grid", every_grid(), ids=str)
def test_member_is_the_index_in_the_dcp_group(grid: Grid) -> None:
    for group in grid.dcp_groups():
        assert [grid.dcp_member(rank) for rank in group] == list(range(grid.dcp))


@pytest.mark.parametrize("grid", every_grid(), ids=str)
def test_a_dcp_group_is_all_replicas_times_its_q_groups(grid: Grid) -> None:
    if grid.dcp == 1:
        assert all(len(group) == 1 for group in grid.q_groups())
        return
    for group in grid.dcp_groups():
        parts = [set(q) for q in grid.q_groups() if set(q) <= set(group)]
        assert len(parts) == grid.pcp
        assert set().union(*parts) == set(group)
        assert {grid.coords(rank).pcp for rank in group} == set(range(grid.pcp))


@pytest.mark.parametrize("grid", every_grid(), ids=str)
def test_no_group_crosses_a_data_parallel_set(grid: Grid) -> None:
    for groups in (grid.tp_groups(), grid.pcp_groups(), grid.dcp_groups(), grid.q_groups()):
        assert all(len({grid.coords(rank).dp for rank in group}) == 1 for group in groups)


def test_coordinates_run_slow_to_fast_over_dp_pcp_tp() -> None:
    grid = Grid(tp=2, pcp=3, dcp=1, dp=2)
    places = [grid.coords(rank) for rank in range(grid.world_size)]
    assert places == [Coords(d, p, t) for d in range(2) for p in range(3) for t in range(2)]
    assert [grid.rank(place.dp, place.pcp, place.tp) for place in places] == list(range(12))
    assert grid.ranks_per_dp == 6


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_off_the_grid_is_refused(rank: int) -> None:
    with pytest.raises(LayoutError, match=f"rank {rank} is not on a grid of 4 ranks"):
        Grid(tp=2, pcp=2).coords(rank)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1, 1), "tp must be at least 1, got 0"),
        ((1, -1, 1, 1), "pcp must be at least 1, got -1"),
        ((1, 1, 0, 1), "dcp must be at least 1, got 0"),
        ((1, 1, 1, 0), "dp must be at least 1, got 0"),
        ((4, 2, 3, 1), r"dcp 3 must be 1 or a multiple of pcp 2 \(dcp = pcp·d; legal dcp here, KV heads aside: 1, 2, 4, 8\)"),
        ((4, 4, 2, 1), r"dcp 2 must be 1 or a multiple of pcp 4"),
        ((8, 1, 3, 1), "tp 8 must be a multiple of d = 3, the part of dcp 3"),
        ((2, 1, 4, 1), "tp 2 must be a multiple of d = 4, the part of dcp 4"),
        ((3, 2, 4, 1), r"tp 3 must be a multiple of d = 2, the part of dcp 4 .*; legal dcp here, KV heads aside: 1, 2, 6\)"),
    ],
)
def test_j2_shapes_that_break_a_law_are_refused(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Grid(*sizes)


def test_names_of_groups_count_over_the_whole_grid_in_opening_order() -> None:
    assert Grid(tp=2, pcp=2, dcp=4).named_groups() == {
        "tp:0": (0, 1), "tp:1": (2, 3), "q:0": (0, 1), "q:1": (2, 3), "dcp:0": (0, 2, 1, 3), "pcp:0": (0, 2), "pcp:1": (1, 3),
    }  # fmt: skip
    assert Grid(tp=2, pcp=2, dcp=2).named_groups() == {
        "tp:0": (0, 1), "tp:1": (2, 3), "q:0": (0,), "q:1": (1,), "q:2": (2,), "q:3": (3,),
        "dcp:0": (0, 2), "dcp:1": (1, 3), "wide:0": (0, 2, 1, 3),
    }  # fmt: skip
    assert list(Grid(dp=2).named_groups()) == ["tp:0", "tp:1", "q:0", "q:1", "dcp:0", "dcp:1"]


@pytest.mark.parametrize("grid", every_grid(), ids=str)
def test_each_rank_is_in_one_group_of_each_kind(grid: Grid) -> None:
    named = grid.named_groups()
    for rank in range(grid.world_size):
        for kind in ("tp", "q", "dcp"):
            name = grid.group_name(kind, rank)
            assert name.startswith(f"{kind}:") and rank in named[name]
            assert [other for other, ranks in named.items() if other.startswith(f"{kind}:") and rank in ranks] == [name]
        for kind, groups in (("pcp", grid.pcp_groups()), ("wide", grid.wide_groups())):
            assert [list(named[grid.group_name(kind, rank)])] == [group for group in groups if rank in group]


@pytest.mark.parametrize("grid", every_grid(), ids=str)
def test_no_group_is_opened_once_more_for_the_pcp_axis(grid: Grid) -> None:
    named = grid.named_groups()
    for name, ranks in named.items():
        if name.startswith(("pcp", "wide")):
            assert [other for other, same in named.items() if same == ranks] == [name]


def test_the_wide_group_cuts_what_a_tp_member_holds_further() -> None:
    grid = Grid(tp=2, pcp=3, dcp=1, dp=2)
    for group in grid.wide_groups():
        assert [grid.coords(rank).tp * 3 + grid.coords(rank).pcp for rank in group] == list(range(6))


def test_a_rank_or_kind_that_is_not_there_has_no_group() -> None:
    for kind, rank in (("tp", 4), ("wide", 4), ("ep", 0)):
        with pytest.raises(LayoutError, match=f"rank {rank} is in no {kind} group"):
            Grid(tp=2, pcp=2).group_name(kind, rank)
