import pytest

from cp_layout.errors import LayoutError
from cp_layout.interleave import Layout
from cp_layout.waste import Sent, token_exact, whole_blocks, whole_virtual_blocks
from tests.cp_layout.dealing import deal, small_layouts


@pytest.mark.parametrize(
    ("layout", "length", "waste"),
    [
        (Layout(4, 1, 16), 16, 0.75),
        (Layout(4, 16, 16), 16, 0.0),
        (Layout(8, 1, 128), 100, 1 - 100 / 1024),
        (Layout(8, 128, 128), 100, 1 - 100 / 128),
    ],
    ids=str,
)
def test_known_waste_of_whole_blocks(layout: Layout, length: int, waste: float) -> None:
    assert whole_blocks(layout, 0, length).waste == pytest.approx(waste, abs=1e-12)
    assert token_exact(0, length).waste == 0


def test_whole_units_against_dealing() -> None:
    for layout in small_layouts():
        b, v = layout.block_size, layout.virtual_block_size
        for start in range(0, 2 * v, 3):
            for end in range(start, 2 * v + 3):
                hands = deal(layout, end)
                blocks = sum(len({i // b for i, token in enumerate(hand) if token >= start}) for hand in hands)
                assert whole_blocks(layout, start, end) == Sent(end - start, blocks * b)
                virtual = len({token // v for token in range(start, end)})
                assert whole_virtual_blocks(layout, start, end) == Sent(end - start, virtual * v)
                assert token_exact(start, end) == Sent(end - start, end - start)


@pytest.mark.parametrize("figure", [token_exact, lambda a, b: whole_blocks(Layout(1, 4, 4), a, b)])
def test_ranges_that_are_none_are_refused(figure) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LayoutError, match=r"\[3, 2\) are not a range"):
        figure(3, 2)
