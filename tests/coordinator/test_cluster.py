import pytest

from coordinator.cluster import scheduling_sets
from cp_layout.grid import Grid


def test_one_rank_is_one_set_without_groups():
    (only,) = scheduling_sets(Grid())
    assert (only.ranks, only.members, only.groups) == ((0,), (0,), {})


def test_members_and_groups_of_a_set_with_dcp_over_pcp_and_tp():
    (only,) = scheduling_sets(Grid(tp=2, pcp=2, dcp=4))
    assert only.ranks == (0, 1, 2, 3)
    assert only.members == (0, 2, 1, 3)
    assert only.groups == {
        "tp:0": (0, 1), "tp:1": (2, 3), "q:0": (0, 1), "q:1": (2, 3), "dcp:0": (0, 2, 1, 3), "pcp:0": (0, 2), "pcp:1": (1, 3),
    }  # fmt: skip


def test_ranks_with_other_heads_share_a_member():
    (only,) = scheduling_sets(Grid(tp=4, dcp=2))
    assert only.members == (0, 1, 0, 1)


def test_each_dp_index_is_a_set_of_its_own_and_group_numbers_run_on():
    first, second = scheduling_sets(Grid(tp=2, pcp=1, dcp=2, dp=2))
    assert (first.ranks, second.ranks) == ((0, 1), (2, 3))
    assert second.groups == {"tp:1": (2, 3), "q:1": (2, 3), "dcp:1": (2, 3)}
    assert second.member_of(3) == 1
    with pytest.raises(ValueError):
        second.member_of(1)


def test_a_side_counts_from_its_first_rank_and_its_groups_keep_their_names():
    (only,) = scheduling_sets(Grid(tp=2, pcp=2, dcp=2), "decode", 3)
    assert (only.ranks, only.members, only.role, only.first_rank) == ((3, 4, 5, 6), (0, 0, 1, 1), "decode", 3)
    assert only.groups == {"tp:0": (3, 4), "tp:1": (5, 6), "dcp:0": (3, 5), "dcp:1": (4, 6), "wide:0": (3, 5, 4, 6)}
    assert only.replica_group == "dcp:0" and only.member_of(5) == 1


@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (3, 1, 3, 2), (2, 2, 2, 2), (4, 2, 4, 2), (2, 3, 1, 2)])
def test_sets_and_their_groups_cover_the_grid_once(shape):
    grid = Grid(*shape)
    sets = scheduling_sets(grid)
    assert sorted(rank for each in sets for rank in each.ranks) == list(range(grid.world_size))
    for each in sets:
        assert set(each.members) == set(range(grid.dcp))
        for name, ranks in each.groups.items():
            assert len(ranks) > 1
            assert set(ranks) <= set(each.ranks)
            if name.startswith("dcp"):
                assert [each.member_of(rank) for rank in ranks] == list(range(grid.dcp))
