"""Which replica computes which tokens of a step: the head-tail partition of a batch over P members.

A row of q ≥ 2P tokens is cut by count into 2P segments of ceil(q/2P) tokens, the last ones shorter or empty; member k takes
segments k and 2P−1−k. Under a causal mask segment s costs s times what segment 0 costs, plus what the context costs, so every
member gets the same number of (query, key) pairs and the same number of rows, with or without context. A shorter row goes
whole to the member with the fewest pairs so far in the batch, ties to the lowest index; a row with an owner goes to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cp_layout.errors import LayoutError

Ints = NDArray[np.int64]

PADDING = -1
"""Entry of `Partition.padded_tokens` that stands for no token."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    """q = `scheduled` consecutive tokens of one request, at the absolute positions `computed` … `computed` + q − 1."""

    computed: int
    scheduled: int
    owner: int | None = None
    """Member that has to take the row whole (decode rows); None = whoever the rule says."""

    def __post_init__(self) -> None:
        if self.computed < 0 or self.scheduled < 1:
            raise LayoutError(f"a row has at least 1 token after 0 or more, got {self.scheduled} after {self.computed}")
        if self.owner is not None and self.owner < 0:
            raise LayoutError(f"a row is owned by member {self.owner}, members count from 0")


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """A batch of R rows and T tokens over P members; nothing but a function of the rows and P.

    The batch numbers its tokens g = 0 … T−1, row after row. Each member has *pieces* (runs of one row), ordered by row, then
    start, and its local tokens follow that order. Arrays over pieces or tokens hold member 0's first, then member 1's, …
    """

    first_piece: Ints
    """[P+1] member m has the pieces first_piece[m] … first_piece[m+1] − 1."""
    first_token: Ints
    """[P+1] member m's local tokens are first_token[m] … first_token[m+1] − 1 of the concatenation."""
    piece_row: Ints
    """[pieces] index of the batch row."""
    piece_start: Ints
    """[pieces] absolute position of the first token."""
    piece_length: Ints
    """[pieces] tokens, at least 1."""
    positions: Ints
    """[T] absolute position of each token of the concatenation."""
    tokens: Ints
    """[T] g of each token of the concatenation."""
    restore: Ints
    """[T] index of token g in the concatenation; inverse of `tokens`."""
    row_start: Ints
    """[R] absolute position of each row's first token."""
    first_of_row: Ints
    """[R+1] row i of the batch has the tokens g = first_of_row[i] … first_of_row[i+1] − 1."""
    pairs: Ints
    """[P] (query, key ≤ query) pairs per member, the context's keys included."""

    @property
    def num_members(self) -> int:
        """P."""
        return len(self.first_piece) - 1

    @property
    def counts(self) -> Ints:
        """[P] local tokens of each member."""
        return np.diff(self.first_token)

    @property
    def rows_max(self) -> int:
        """Local tokens of the fullest member: what a collective of equal counts pads to. 0 without tokens."""
        return int(self.counts.max(initial=0))

    @property
    def holder(self) -> Ints:
        """[T] member that computes token g."""
        return np.searchsorted(self.first_token, self.restore, side="right") - 1

    @property
    def restore_padded(self) -> Ints:
        """[T] index of token g in a gather of P·rows_max tokens, member after member, each padded to `rows_max`."""
        holder = self.holder
        return holder * self.rows_max + self.restore - self.first_token[holder]

    @property
    def padded_tokens(self) -> Ints:
        """[P, rows_max] g of each entry of that gather, PADDING where there is none."""
        padded = np.full(self.num_members * self.rows_max, PADDING, dtype=np.int64)
        padded[self.restore_padded] = np.arange(len(self.tokens))
        return padded.reshape(self.num_members, self.rows_max)

    @property
    def last_holder(self) -> Ints:
        """[R] member that computes the last token of each row; PADDING for a row that `only` left out."""
        last = np.full(len(self.first_of_row) - 1, PADDING, dtype=np.int64)
        kept = np.diff(self.first_of_row) > 0
        last[kept] = self.holder[self.first_of_row[1:][kept] - 1]
        return last

    def pieces_of(self, member: int) -> slice:
        """The member's part of the piece arrays."""
        return slice(int(self.first_piece[member]), int(self.first_piece[member + 1]))

    def tokens_of(self, member: int) -> slice:
        """The member's part of `positions` and `tokens`."""
        return slice(int(self.first_token[member]), int(self.first_token[member + 1]))

    def only(self, keep: NDArray[np.bool_]) -> "Partition":
        """The same assignment with the rows of `keep` [R] alone, e.g. to exchange decode and prefill rows in different ways.

        Row indices stay those of the batch; g, and all that is counted, runs over the kept rows' tokens.
        """
        kept = keep[self.piece_row]
        return _assemble(
            self.row_start,
            np.where(keep, np.diff(self.first_of_row), 0),
            self.num_members,
            np.repeat(np.arange(self.num_members), np.diff(self.first_piece))[kept],
            self.piece_row[kept],
            self.piece_start[kept],
            self.piece_length[kept],
        )


def partition(rows: Sequence[BatchRow], num_members: int) -> Partition:
    """Cuts the batch over P = `num_members` members; costs O(pieces + tokens).

    Raises `LayoutError` for P < 1 and for an owner that is no member.
    """
    p = num_members
    if p < 1:
        raise LayoutError(f"a batch is cut over at least 1 member, got {p}")
    computed = np.array([row.computed for row in rows], dtype=np.int64)
    scheduled = np.array([row.scheduled for row in rows], dtype=np.int64)
    owner = np.array([_NOBODY if row.owner is None else row.owner for row in rows], dtype=np.int64)
    if (owner >= p).any():
        raise LayoutError(f"a row is owned by member {owner.max()}, the members are 0 to {p - 1}")
    cut = np.flatnonzero((owner == _NOBODY) & (scheduled >= 2 * p))
    member, piece_row, start, length = _cut(cut, computed[cut], scheduled[cut], p)
    whole = owner.copy()
    whole[cut] = p  # nobody's row alone
    _give_to_the_lightest(whole, computed, scheduled, (member, piece_row, _pairs(start, length)), p)
    undivided = np.flatnonzero(whole < p)
    return _assemble(
        computed,
        scheduled,
        p,
        np.concatenate([member, whole[undivided]]),
        np.concatenate([piece_row, undivided]),
        np.concatenate([start, computed[undivided]]),
        np.concatenate([length, scheduled[undivided]]),
    )


_NOBODY = -1


def _pairs(start: Ints, length: Ints) -> Ints:
    """(query, key ≤ query) pairs of runs of `length` queries from the absolute position `start` on."""
    return length * start + length * (length + 1) // 2


def _cut(row: Ints, computed: Ints, scheduled: Ints, p: int) -> tuple[Ints, Ints, Ints, Ints]:
    """(member, row, start, length) of the non-empty segments, neighbours on one member already one piece."""
    size = -(-scheduled // (2 * p))
    head = np.arange(p)
    tail = 2 * p - 1 - head
    first, last = (np.minimum(np.multiply.outer(size, part), scheduled[:, None]) for part in (head, tail))
    end_of_first, end_of_last = (np.minimum(part + size[:, None], scheduled[:, None]) for part in (first, last))
    joined = end_of_first == last
    end_of_first[joined] = end_of_last[joined]
    alone = ~joined & (end_of_last > last)
    starts = np.stack([first, last])
    ends = np.stack([end_of_first, end_of_last])
    there = np.stack([np.ones_like(alone), alone])
    members = np.broadcast_to(head, starts.shape)[there]
    rows = np.broadcast_to(row[:, None], starts.shape)[there]
    return members, rows, (starts + computed[:, None])[there], (ends - starts)[there]


def _give_to_the_lightest(whole: Ints, computed: Ints, scheduled: Ints, cut: tuple[Ints, Ints, Ints], p: int) -> None:
    """Fills in the member of every row of `whole` that is nobody's. cut: (member, row, pairs) of the pieces of cut rows."""
    open_rows = np.flatnonzero(whole == _NOBODY)
    if not open_rows.size:
        return
    pairs = _pairs(computed, scheduled)
    settled = np.flatnonzero((whole >= 0) & (whole < p))
    member = np.concatenate([cut[0], whole[settled]])
    row = np.concatenate([cut[1], settled])
    weight = np.concatenate([cut[2], pairs[settled]])
    # What lies before each open row: pieces go to the open row that follows them, then the counts add up.
    before = np.zeros((len(open_rows) + 1, p), dtype=np.int64)
    np.add.at(before, (np.searchsorted(open_rows, row), member), weight)
    load = np.zeros(p, dtype=np.int64)
    for index, settled_before in zip(open_rows, before, strict=False):
        load += settled_before
        lightest = int(load.argmin())
        whole[index] = lightest
        load[lightest] += pairs[index]


def _assemble(row_start: Ints, row_length: Ints, p: int, member: Ints, piece_row: Ints, start: Ints, length: Ints) -> Partition:
    order = np.lexsort((start, piece_row, member))
    member, piece_row, start, length = member[order], piece_row[order], start[order], length[order]
    first_of_row = _offsets(row_length)
    first_of_piece = _offsets(length)
    within = np.arange(first_of_piece[-1]) - np.repeat(first_of_piece[:-1], length)
    tokens = np.repeat(first_of_row[piece_row] + start - row_start[piece_row], length) + within
    restore = np.empty_like(tokens)
    restore[tokens] = np.arange(len(tokens))
    pairs = np.zeros(p, dtype=np.int64)
    np.add.at(pairs, member, _pairs(start, length))
    first_piece = np.searchsorted(member, np.arange(p + 1))
    return Partition(
        first_piece=first_piece,
        first_token=first_of_piece[first_piece],
        piece_row=piece_row,
        piece_start=start,
        piece_length=length,
        positions=np.repeat(start, length) + within,
        tokens=tokens,
        restore=restore,
        row_start=row_start,
        first_of_row=first_of_row,
        pairs=pairs,
    )


def _offsets(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
