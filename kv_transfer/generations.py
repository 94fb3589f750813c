"""When each block of a pool was handed out last: how a reader learns that what it read is no longer what it asked for."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Blocks = Sequence[int] | NDArray[np.int64]


class Generations:
    """One stamp per block, from a counter of the pool that only grows.

    A set of blocks is untouched since `now()` returned g exactly when no stamp in it exceeds g. Stamp a block *before* its new
    owner writes to it: a reader that looks at the stamps after it has read then sees every write that it could have met.
    `stamp` belongs to one thread; anybody may look.
    """

    def __init__(self, num_blocks: int) -> None:
        self._stamps = np.zeros(num_blocks, np.int64)
        self._now = 0

    def now(self) -> int:
        """The newest stamp; 0 before the first."""
        return self._now

    def stamp(self, blocks: Blocks) -> int:
        """The blocks have a new owner from now on; returns their stamp. IndexError for a block that is not in the pool."""
        ids = _ids(blocks)
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(self._stamps):
            raise IndexError(f"blocks {ids.min()} to {ids.max()} of a pool of {len(self._stamps)}")
        generation = self._now + 1
        self._stamps[ids] = generation
        self._now = generation
        return generation

    def untouched(self, blocks: Blocks, since: int) -> bool:
        """Whether none of the blocks was handed out after `since`."""
        return self._now <= since or bool((self._stamps[_ids(blocks)] <= since).all())


def _ids(blocks: Blocks) -> NDArray[np.int64]:
    return np.asarray(blocks, dtype=np.int64)
