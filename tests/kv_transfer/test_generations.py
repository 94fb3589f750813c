import numpy as np
import pytest

from kv_transfer.generations import Generations


def test_only_what_was_handed_out_since_is_touched() -> None:
    generations = Generations(4)
    assert generations.untouched([0, 1, 2, 3], generations.now())
    first = generations.stamp([0, 1])
    assert generations.untouched([0, 1], first) and not generations.untouched([1, 2], first - 1)
    second = generations.stamp(np.array([1]))
    assert second > first == generations.now() - 1
    assert generations.untouched([0, 2, 3], first) and not generations.untouched([0, 1], first)
    assert generations.untouched([], 0)


def test_stamping_nothing_touches_nothing() -> None:
    generations = Generations(2)
    assert generations.stamp([]) == 1 and generations.untouched([0, 1], 0)


@pytest.mark.parametrize("blocks", [[4], [-1], [0, 9]])
def test_blocks_beyond_the_pool_are_refused(blocks: list[int]) -> None:
    with pytest.raises(IndexError, match="of a pool of 4"):
        Generations(4).stamp(blocks)
