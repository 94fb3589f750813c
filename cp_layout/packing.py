"""How the bytes of one link of a transfer are cut into messages.

A *plane* is one layer's K, V or latent cache; a *row* is one token of one plane, the bytes of the link's heads. The rows of a
link stand plane by plane, in each plane token by token in the order of the link's runs. A message is a stretch of rows, and
all but the last have the same number of them: so a message's index alone says which planes and tokens are in it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cp_layout.errors import LayoutError

GROUP_ROWS = 64
"""Messages begin at multiples of it, so that blocks of rows are not cut without need."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Messages of one link. All sizes at least 1, or `LayoutError`; a row larger than `message_bytes` travels alone."""

    planes: int
    tokens: int
    row_bytes: int
    message_bytes: int

    def __post_init__(self) -> None:
        if min(self.planes, self.tokens, self.row_bytes, self.message_bytes) < 1:
            raise LayoutError(
                f"{self.planes} planes of {self.tokens} tokens, {self.row_bytes} bytes each, in messages of "
                f"{self.message_bytes} bytes: every size must be at least 1"
            )

    @property
    def num_rows(self) -> int:
        """Rows of the link."""
        return self.planes * self.tokens

    @property
    def total_bytes(self) -> int:
        """Payload of all messages."""
        return self.num_rows * self.row_bytes

    @property
    def rows_per_message(self) -> int:
        """Rows of every message but the last: what fits, in whole groups of GROUP_ROWS if it is more than one."""
        fit = max(1, self.message_bytes // self.row_bytes)
        return min(fit // GROUP_ROWS * GROUP_ROWS if fit > GROUP_ROWS else fit, self.num_rows)

    @property
    def num_messages(self) -> int:
        """Messages of the link: ceil(bytes / message_bytes) where groups of rows fill messages exactly."""
        return -(-self.num_rows // self.rows_per_message)

    def rows(self, message: int) -> range:
        """Rows of a message; `LayoutError` when there is no such message."""
        if not 0 <= message < self.num_messages:
            raise LayoutError(f"message {message} is not one of {self.num_messages}")
        size = self.rows_per_message
        return range(message * size, min((message + 1) * size, self.num_rows))


@dataclass(frozen=True, slots=True, eq=False)
class PlaneIndex:
    """Where the parts of a link lie in a pool whose planes follow one another.

    one: [n] places of a plane's parts in plane 0, in the order of the link's runs. stride: from a place to the same one of the
    next plane.
    """

    one: NDArray[np.int64]
    stride: int

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """[stop − start] places of parts [start, stop), counted plane by plane. Cost: O(stop − start), whatever n is."""
        size = len(self.one)
        first, last = start // size, (stop - 1) // size
        if stop <= start:
            return self.one[:0]
        start, stop = start - first * size, stop - last * size
        if first == last:
            return self.one[start:stop] + first * self.stride
        whole = np.arange(first + 1, last)[:, None] * self.stride + self.one
        return np.concatenate([self.one[start:] + first * self.stride, whole.reshape(-1), self.one[:stop] + last * self.stride])
