"""What goes into a scheduler and comes out of it, apart from requests and steps."""

from dataclasses import dataclass


class QueueFull(RuntimeError):
    """As many requests wait as are allowed to, or more would with those that came together; trying again later helps."""

    def __init__(self, waiting: int, more: int, limit: int) -> None:
        together = f" and {more} more would make {waiting + more}" if more > 1 else ""
        super().__init__(f"{waiting} requests are waiting{together}, the limit is {limit}")


class StepOrderError(RuntimeError):
    """A step is asked for while one is in flight, or committed without being the one in flight."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of one scheduling set; `ValueError` where one that must be at least 1 is not."""

    max_num_seqs: int
    """Requests that run at the same time."""
    max_num_batched_tokens: int
    """Tokens of one step."""
    max_waiting: int
    """Requests that may queue; preempted ones are counted but never refused."""
    max_ahead: int = 0
    """Steps that ranks may take by themselves after one that they were sent."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Progress:
    """What a committed step means for one request: a token, an end, or both."""

    handle: int
    new_token: int | None
    finished: str | None
    """stop, length, abort or error; None while the request goes on."""
    error: str | None = None


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start, in tokens except `preemptions`."""

    queried_tokens: int = 0
    """Prompt tokens of first admissions; what is recomputed after a preemption is no query (F11)."""
    hit_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
