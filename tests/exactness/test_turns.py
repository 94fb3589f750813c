"""Merges that take turns leave no grid without either of them."""

from types import ModuleType

import pytest

from tests.exactness import test_mla, test_mla_pcp, test_pcp, test_shapes
from tests.exactness.turns import merges_in_turn


@pytest.mark.parametrize(
    ("module", "along"),
    [(test_shapes, slice(1, 2)), (test_mla, slice(1, 3)), (test_pcp, slice(1, 3)), (test_mla_pcp, slice(1, 4))],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_grid_with_shards_has_both_merges(module: ModuleType, along: slice) -> None:
    """Also with every gather and interleave where there are enough models for that."""
    cases = [case for case in module.all_cases() if case[1][2] > 1]
    assert {case[along] for case in cases if case[-1] == "a2a"} == {case[along] for case in cases if case[-1] == "ag_rs"}


def test_merges_alternate_in_each_group() -> None:
    cases = [("x", 1), ("y", 1), ("x", 2), ("x", 3), ("y", 2)]
    merged = merges_in_turn(cases, lambda case: case[0])
    assert merged == [("x", 1, "a2a"), ("y", 1, "a2a"), ("x", 2, "ag_rs"), ("x", 3, "a2a"), ("y", 2, "ag_rs")]
