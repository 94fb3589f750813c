"""What the scheduler hands to the dispatcher: one step of one scheduling set, free of protobuf."""

from dataclasses import dataclass
from enum import Enum, auto

from cp_layout.cost import StepFacts

NOTHING_CHOSEN = 0
"""Cost version of a step whose way of computing was no choice of the cost model."""


class DecodeMode(Enum):
    """How the replicas of a group share a step's rows."""

    REPLICATED = auto()
    """Every replica runs every row."""
    OWNER = auto()
    """Row i lives on one replica."""
    SPLIT = auto()
    """The replicas act as one wider tensor-parallel group."""


class Gather(Enum):
    """What completes attention over the sequence axis."""

    NONE = auto()
    """Every member has all query rows; partial attention is merged over the shards."""
    Q = auto()
    KV = auto()
    """Keys travel to prefill rows; over a sharded cache, the queries of decode rows still do."""
    KV_ALL = auto()
    """Keys travel to all rows: for latents, of which there is one per token however many heads ask."""


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
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), ids ascending."""
    logprobs: bool = False
    """Log-probabilities go with each token even when no alternatives do."""
    prompt_logprobs: int | None = None
    """Alternatives to report with each prompt token; None = the prompt is not scored."""

    @property
    def counts_tokens(self) -> bool:
        """Whether a draw depends on the tokens before it, beyond what the model makes of them."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class Admission:
    """A request whose state the ranks are to create before the rows run."""

    handle: int
    sampling: Sampling
    shard_offset: int
    num_cached_tokens: int
    num_prompt_tokens: int
    owner: int
    """Replica, by its place on the PCP axis, where the decode rows run in steps of OWNER."""
    num_prefill_tokens: int
    """Tokens known at this admission: rows that start here or later are decode rows."""
    cached_token_ids: tuple[int, ...] = ()
    """The cached tokens, for requests whose draws count tokens: no row will carry them."""


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
    score_start: int = 0
    """Position of the first prompt token to score; start < score_start ≤ start + q."""
    score_token_ids: tuple[int, ...] = ()
    """The prompt tokens at score_start … whose log-probability is reported."""


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """Everything the ranks need to know for one forward pass; a step may release only, and have no rows."""

    released: tuple[int, ...]
    admitted: tuple[Admission, ...]
    rows: tuple[Row, ...]
    decode_mode: DecodeMode
    gather: Gather
    cost_version: int
    """Version of the cost model that chose, or `NOTHING_CHOSEN`."""
    facts: StepFacts = StepFacts()  # noqa: RUF009 - frozen
    ahead: int = 0
    """Further steps that the ranks may take by themselves (see `coordinator.runs`)."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the flat batch."""
        return sum(len(row.token_ids) for row in self.rows)
