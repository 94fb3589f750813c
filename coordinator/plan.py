"""What the scheduler hands to the dispatcher: one step of one scheduling set, free of protobuf."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one request, validated (see `coordinator.limits`)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    top_logprobs: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request, end-of-sequence ids included unless they are ignored."""
    min_tokens: int = 0
    max_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Admission:
    """A request whose state the ranks are to create before the rows run."""

    handle: int
    sampling: Sampling
    shard_offset: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """q consecutive tokens of one request."""

    handle: int
    start: int
    token_ids: tuple[int, ...]
    new_blocks: tuple[tuple[int, ...], ...]
    """Per pool member, the block ids appended to its table; empty tuple when there are none at all."""
    sample: bool
    output_index: int
    ban_stop: bool


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """Everything the ranks need to know for one forward pass; a step may release only, and have no rows."""

    released: tuple[int, ...]
    admitted: tuple[Admission, ...]
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in the flat batch."""
        return sum(len(row.token_ids) for row in self.rows)
