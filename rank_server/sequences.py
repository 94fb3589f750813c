"""What a rank remembers of the requests it serves: incremental block tables and committed lengths."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cp_layout.interleave import Layout
from rank_server.penalties import TokenHistory

_INITIAL_COLUMNS = 16


class PlanRefused(ValueError):
    """A plan contradicts the rank's state; the message names the request and the numbers."""


@dataclass(frozen=True, slots=True)
class SequenceSampling:
    """Sampling parameters of a request, constant over its life."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    top_logprobs: int
    stop_token_ids: tuple[int, ...]
    min_p: float
    bias: tuple[tuple[int, float], ...]
    logprobs: bool
    prompt_logprobs: int


@dataclass(slots=True)
class Sequence:
    """One request on this rank: its shard, the blocks of that shard, and how many tokens are committed."""

    handle: int
    shard: int
    shard_offset: int
    """Shard r of the request lies on member (r + shard_offset) mod N."""
    owner: int
    """Replica that computes the request's decode rows when each row is computed by one replica."""
    num_prefill_tokens: int
    """Rows that start here or later are decode rows."""
    sampling: SequenceSampling
    num_computed: int
    history: TokenHistory | None = None
    """Only on ranks that sample, and only with penalties."""
    decoded_by_owner: bool = False
    """Whether decode rows were computed by the owner alone."""
    num_blocks: int = 0
    _table: Tensor = field(default_factory=lambda: torch.empty(_INITIAL_COLUMNS, dtype=torch.int64, device="cpu"))

    @property
    def block_table(self) -> Tensor:
        """[num_blocks] int64 view in host memory, whatever the device; grows by `append_blocks`."""
        return self._table[: self.num_blocks]

    def append_blocks(self, block_ids: list[int]) -> None:
        """Adds columns at the end; amortised O(1) per block."""
        needed = self.num_blocks + len(block_ids)
        if needed > len(self._table):
            grown = torch.empty(max(needed, 2 * len(self._table)), dtype=torch.int64, device="cpu")
            grown[: self.num_blocks] = self._table[: self.num_blocks]
            self._table = grown
        self._table[self.num_blocks : needed] = torch.tensor(block_ids, dtype=torch.int64, device="cpu")
        self.num_blocks = needed

    def check_room(self, layout: Layout, length: int) -> None:
        """Raises `PlanRefused` unless the table has a block for every token this shard owns of [0, length)."""
        needed = layout.blocks_needed(self.shard, length)
        if needed > self.num_blocks:
            raise PlanRefused(
                f"request {self.handle}: {length} tokens need {needed} blocks on shard {self.shard}, "
                f"its table has {self.num_blocks}"
            )


class SequenceTable:
    """The requests of one rank, by handle."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}

    def admit(self, sequence: Sequence) -> None:
        """Takes a request in; a handle that is already present is refused."""
        if sequence.handle in self._sequences:
            raise PlanRefused(f"request {sequence.handle} is admitted twice")
        self._sequences[sequence.handle] = sequence

    def release(self, handle: int) -> None:
        """Forgets a request; an unknown handle is refused."""
        if self._sequences.pop(handle, None) is None:
            raise PlanRefused(f"request {handle} is released but not known")

    def get(self, handle: int) -> Sequence:
        """The request; an unknown handle is refused."""
        sequence = self._sequences.get(handle)
        if sequence is None:
            raise PlanRefused(f"request {handle} is not known")
        return sequence

    def clear(self) -> None:
        """Forgets all requests."""
        self._sequences.clear()

    @property
    def blocks_in_use(self) -> int:
        """Entries of all block tables."""
        return sum(sequence.num_blocks for sequence in self._sequences.values())
