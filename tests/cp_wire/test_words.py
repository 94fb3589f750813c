"""Numbers as people read them."""

import pytest

from cp_wire.words import counted, percent


@pytest.mark.parametrize(("number", "said"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1001, "1001 rows")])
def test_one_of_a_kind(number, said):
    assert counted(number, "row") == said


@pytest.mark.parametrize(
    ("share", "digits", "said"),
    [
        (0, 1, "0.0%"),
        (1, 1, "100.0%"),
        (1, 0, "100%"),
        (0.125, 1, "12.5%"),
        (0.9994, 1, "99.9%"),
        (0.99998, 1, "99.998%"),
        (0.997, 0, "99.7%"),
        (0.004, 0, "0.4%"),
        (0.00002, 1, "0.002%"),
        (1e-12, 1, "0.000000%"),
    ],
)
def test_what_is_neither_all_nor_nothing_does_not_look_so(share, digits, said):
    assert percent(share, digits) == said
