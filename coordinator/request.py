"""One request inside the coordinator: its tokens, its counters and its life."""

from dataclasses import dataclass, field
from enum import Enum, auto

from coordinator.plan import Sampling


class State(Enum):
    """Where a request is in its life."""

    WAITING = auto()
    """Queued, never admitted or preempted; holds no block and the ranks don't know it."""
    RUNNING = auto()
    """Holds blocks; the ranks know it."""
    ENDING = auto()
    """Ended while a step that carries it is in flight; its blocks are freed when that step, or the last one of its run, is
    committed."""
    FINISHED = auto()
    """Holds nothing; terminal."""


class Event(Enum):
    """What can happen to a request."""

    ADMIT = auto()
    """Given a seat, blocks and a first row."""
    PREEMPT = auto()
    """Its blocks are needed by an older request; it is computed again later."""
    END_IN_FLIGHT = auto()
    """Aborted or stopped while a step carries it."""
    END = auto()
    """Over: stopped, out of tokens, aborted or failed, with no step in flight that carries it."""


_S, _E = State, Event

TRANSITIONS: dict[tuple[State, Event], State | None] = {
    (_S.WAITING, _E.ADMIT): _S.RUNNING,
    (_S.WAITING, _E.PREEMPT): None,
    (_S.WAITING, _E.END_IN_FLIGHT): None,
    (_S.WAITING, _E.END): _S.FINISHED,
    (_S.RUNNING, _E.ADMIT): None,
    (_S.RUNNING, _E.PREEMPT): _S.WAITING,
    (_S.RUNNING, _E.END_IN_FLIGHT): _S.ENDING,
    (_S.RUNNING, _E.END): _S.FINISHED,
    (_S.ENDING, _E.ADMIT): None,
    (_S.ENDING, _E.PREEMPT): None,
    (_S.ENDING, _E.END_IN_FLIGHT): _S.ENDING,
    (_S.ENDING, _E.END): _S.FINISHED,
    (_S.FINISHED, _E.ADMIT): None,
    (_S.FINISHED, _E.PREEMPT): None,
    (_S.FINISHED, _E.END_IN_FLIGHT): _S.FINISHED,
    (_S.FINISHED, _E.END): _S.FINISHED,
}
"""Next state of every (state, event) pair; None = the event cannot happen in this state and is refused."""


class IllegalTransition(RuntimeError):
    """An event that cannot happen in the request's state; always a fault of the coordinator itself."""


@dataclass(slots=True, eq=False)
class Request:
    """A request from its acceptance to its end. Lengths and counters are in tokens.

    Known tokens are prompt + output; those with a position below `num_computed` have their KV in the cache. A preemption
    resets `num_computed` only: output stays, so the request resumes as if prompt + output were its prompt (E2).
    """

    handle: int
    """Unique over the life of the cluster."""
    request_id: str
    prompt: list[int]
    sampling: Sampling
    salt: bytes = b""
    """Tenant's salt of the prefix cache."""
    digests: list[bytes] = field(default_factory=list)
    """Chain of the first hash units of the known tokens (`cp_layout.blocks`), its own list. Whoever makes the request
    computes the prompt's, where that delays nobody; the scheduler adds what is missing.
    """
    output: list[int] = field(default_factory=list)
    state: State = State.WAITING
    num_computed: int = 0
    max_computed: int = 0
    """Highest `num_computed` ever reached."""
    num_cached_tokens: int = 0
    """Prefix hit of the first admission."""
    num_recomputed: int = 0
    """Tokens computed again after preemptions."""
    num_preemptions: int = 0
    was_admitted: bool = False
    finish_reason: str | None = None
    """stop, length, abort or error."""
    error: str | None = None
    shard_offset: int = 0
    """Shard r lies on member (r + shard_offset) mod N; chosen at each admission."""
    owner: int = 0
    """Replica that computes its decode rows when rows are dealt out; chosen at each admission."""
    num_prefill_tokens: int = 0
    """`num_known` at its last admission."""
    is_bound: bool = False
    """Some of its KV lies with its owner alone (see `coordinator.owners`)."""
    leader: "Request | None" = None
    """Another completion of the same prompt, which computes it: this one waits to find it in the prefix cache."""
    is_leased: bool = False
    """Others read its blocks, while it runs and afterwards: nobody takes them away, and they are not freed before
    `Scheduler.end_lease`."""
    num_scored: int = 1
    """Prompt positions below this one have had their log-probabilities reported; position 0 has none."""

    @property
    def num_known(self) -> int:
        """Tokens of prompt + output."""
        return len(self.prompt) + len(self.output)

    @property
    def follows(self) -> bool:
        """Whether it still has to wait for its leader's prompt."""
        leader = self.leader
        return leader is not None and leader.state is not State.FINISHED and leader.max_computed < len(leader.prompt)

    @property
    def is_unscored(self) -> bool:
        """Whether log-probabilities of its prompt are still to come."""
        return self.sampling.prompt_logprobs is not None and self.num_scored < len(self.prompt)

    def known(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens at positions [start, stop) of prompt + output, stop ≤ `num_known`; costs O(stop − start)."""
        split = len(self.prompt)
        if start >= split:
            return tuple(self.output[start - split : stop - split])
        if stop <= split:
            return tuple(self.prompt[start:stop])
        return (*self.prompt[start:], *self.output[: stop - split])

    def apply(self, event: Event) -> None:
        """Moves to the next state; raises `IllegalTransition` where the table refuses the event."""
        following = TRANSITIONS[self.state, event]
        if following is None:
            raise IllegalTransition(f"request {self.handle} is {self.state.name}, {event.name} cannot happen")
        self.state = following

    def end(self, event: Event, reason: str, error: str | None = None) -> None:
        """Applies END or END_IN_FLIGHT; the first reason given is the one that stays."""
        self.apply(event)
        if self.finish_reason is None:
            self.finish_reason, self.error = reason, error

    def advance(self, num_computed: int) -> None:
        """A step has written the KV of the tokens up to `num_computed`; counts those that had been computed before."""
        self.num_recomputed += max(0, min(num_computed, self.max_computed) - self.num_computed)
        self.num_computed = num_computed
        self.max_computed = max(self.max_computed, num_computed)
