"""A request whose prompt is computed by one set and whose output by another: what may happen to it, and what may then have to
be done. The words of `coordinator.passage`, which says what follows from what."""

from dataclasses import dataclass

# -- events


@dataclass(frozen=True, slots=True)
class Reserved:
    """The output's set has a place for it, and the KV of its first `num_cached` tokens."""

    num_cached: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The prompt's set has committed the step up to this length; the prompt goes on."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The whole prompt is computed; its first token was drawn and is not the last."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Every rank has written and verified the range that was on its way."""


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """The range that was on its way did not come over; some ranks may still write parts of it."""

    cause: str
    transient: bool


@dataclass(frozen=True, slots=True)
class MoveStopped:
    """No rank writes anything for the request any more."""


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """No rank reads anything of the request any more."""


@dataclass(frozen=True, slots=True)
class PrefillLost:
    """The prompt's set is gone, with all it had computed and leased, or there is none."""

    cause: str


@dataclass(frozen=True, slots=True)
class Left:
    """The request is over for its client: it left, the first token was the last, a row failed, or the output's set is gone."""


Event = Reserved | Computed | Prefilled | Moved | MoveFailed | MoveStopped | LeaseEnded | PrefillLost | Left

# -- actions


@dataclass(frozen=True, slots=True)
class Prefill:
    """Queue the prompt."""


@dataclass(frozen=True, slots=True)
class Move:
    """Bring tokens [start, end) over. attempt: 1, and more after failures that may pass, which it gives time to pass."""

    start: int
    end: int
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class StopMove:
    """Have all ranks stop writing; answered by `MoveStopped`."""


@dataclass(frozen=True, slots=True)
class Activate:
    """The output's set goes on after its first `num_tokens` tokens. cause: why others were not moved; None = all have come."""

    num_tokens: int
    cause: str | None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Give the reservation back."""


@dataclass(frozen=True, slots=True)
class Fail:
    """End the request with this cause, which another attempt of the client may not meet, and give the reservation back."""

    cause: str


@dataclass(frozen=True, slots=True)
class AbortPrefill:
    """The prompt's set computes nothing more of it."""


@dataclass(frozen=True, slots=True)
class EndLease:
    """Have all ranks stop reading; answered by `LeaseEnded`."""


@dataclass(frozen=True, slots=True)
class ForgetMoves:
    """Ranks that wrote, and now have no move to stop and no lease to end, may forget the request; not answered."""


@dataclass(frozen=True, slots=True)
class FreePrefill:
    """The blocks on the prompt's set are free."""


Action = Prefill | Move | StopMove | Activate | Cancel | Fail | AbortPrefill | EndLease | ForgetMoves | FreePrefill
