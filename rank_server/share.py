"""Which tokens of a step one replica computes, and for which of them it answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from cp_layout.zigzag import Partition
from rank_server.attention.rows import KvRow, Span, whole


@dataclass(frozen=True, slots=True)
class Share:
    """One replica's part of a step. The TP members of a replica have the same one."""

    spans: tuple[Span, ...]
    """What it computes, in the order of its flat batch."""
    answered: tuple[tuple[Span, ...], ...]
    """Per replica, the spans whose logits it computes: the same on all ranks. Each token is in one replica's, or in those of
    all replicas that together compute them."""
    replica: int

    @property
    def answers(self) -> bool:
        """Whether the replica reports anything of what it computes."""
        return len(self.answered[self.replica]) > 0


def replicated(rows: Sequence[KvRow], replicas: int, replica: int) -> Share:
    """Every replica computes all rows, the first one answers."""
    spans = whole(rows)
    return Share(spans, (spans, *((),) * (replicas - 1)), replica)


def split(rows: Sequence[KvRow], replicas: int, replica: int) -> Share:
    """All replicas together compute every row, logits included."""
    spans = whole(rows)
    return Share(spans, (spans,) * replicas, replica)


def owned(partition: Partition, replica: int) -> Share:
    """Every token is computed by one replica, which answers for it."""
    pieces = zip(partition.piece_row.tolist(), partition.piece_start.tolist(), partition.piece_length.tolist(), strict=True)
    spans = tuple(Span(*piece) for piece in pieces)
    answered = tuple(spans[partition.pieces_of(member)] for member in range(partition.num_members))
    return Share(answered[replica], answered, replica)
