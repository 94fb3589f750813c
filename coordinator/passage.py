"""One request whose prompt is computed by one set and whose output by another: what happens next.

Pure: `advance(state, event)` says the next state and what is to be done, in order. Two things hold throughout. While a range
is on its way, or may be, the target's blocks are neither computed in nor given back: `StopMove` and its answer `MoveStopped`
come first. And the source's blocks stay held until `LeaseEnded`, or until the prompt's set is lost.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto

from coordinator.pd import (
    AbortPrefill,
    Action,
    Activate,
    Cancel,
    Computed,
    EndLease,
    Event,
    Fail,
    ForgetMoves,
    FreePrefill,
    LeaseEnded,
    Left,
    Move,
    Moved,
    MoveFailed,
    MoveStopped,
    Prefill,
    Prefilled,
    PrefillLost,
    Reserved,
    StopMove,
)

ATTEMPTS = 3
"""At one range, if its failure may pass; each after a longer pause than the one before."""

Decision = Activate | Cancel | Fail
Step = tuple["Passage", tuple[Action, ...]]


class Phase(Enum):
    """Where a request is in its life."""

    WAITING = auto()
    """Nothing is reserved for it yet."""
    PREFILL = auto()
    """Its prompt is computed, or waits to be; finished ranges move meanwhile."""
    MOVING = auto()
    """Its prompt is computed and its first token drawn; the rest of the KV is on its way."""
    ENDING = auto()
    """It is decided how it goes on; what moves or is leased comes to its end."""
    OVER = auto()
    """Nothing is held for its passage any more; it may go on where its output is computed."""


@dataclass(frozen=True, slots=True)
class Passage:
    """State of one request. Lengths in tokens; length: of its prompt.

    moves: whether anything is to be moved: not when its first token will be its last. recompute: what a failure leads to,
    instead of the request's end.
    """

    length: int
    moves: bool = True
    recompute: bool = True
    phase: Phase = Phase.WAITING
    computed: int = 0
    """By the prompt's set."""
    moved: int = 0
    """Tokens from the first on whose KV is in the reservation, verified."""
    moving: int | None = None
    """End of the range that starts at `moved` and is on its way; None when nobody writes."""
    attempt: int = 1
    leased: bool = False
    """Whether ranks of the prompt's set were told of readers."""
    prefill_holds: bool = False
    """Whether the prompt's set may still have blocks of the request."""
    decision: Decision | None = None
    """What is to become of it once nobody writes."""


class Impossible(RuntimeError):
    """An event that can't happen in this state; always a fault of the coordinator itself."""


def advance(state: Passage, event: Event) -> Step:
    """The next state, and what to do. What comes too late to matter changes nothing; `Impossible` for what can't be."""
    if state.phase is Phase.OVER:
        return state, ()
    match event:
        case Reserved(num_cached):
            if state.phase is not Phase.WAITING:
                raise Impossible(f"reserved in {state.phase.name}")
            return replace(state, phase=Phase.PREFILL, moved=num_cached, prefill_holds=True), (Prefill(),)
        case Computed(tokens):
            return _computed(state, tokens, Phase.PREFILL)
        case Prefilled():
            return _computed(state, state.length, Phase.MOVING)
        case Moved():
            return _moved(state)
        case MoveFailed(cause, transient):
            return _move_failed(state, cause, transient)
        case MoveStopped():
            return _stopped(state)
        case LeaseEnded():
            return _lease_ended(state)
        case PrefillLost(cause):
            return _prefill_lost(state, cause)
        case Left():
            return _left(state)


def _computed(state: Passage, tokens: int, phase: Phase) -> Step:
    if state.phase is Phase.ENDING:
        return state, ()
    if state.phase is not Phase.PREFILL or tokens < state.computed or (phase is Phase.MOVING and not state.moves):
        raise Impossible(f"{tokens} tokens computed in {state.phase.name} after {state.computed}")
    return _go_on(replace(state, phase=phase, computed=tokens))


def _moved(state: Passage) -> Step:
    if state.moving is None:
        raise Impossible(f"moved in {state.phase.name} without a move")
    if state.phase is Phase.ENDING:
        return state, ()  # it came over while it was being stopped, and `MoveStopped` is still to come
    return _go_on(replace(state, moved=state.moving, moving=None, attempt=1))


def _move_failed(state: Passage, cause: str, transient: bool) -> Step:
    if state.moving is None:
        raise Impossible(f"a move failed in {state.phase.name} without a move")
    if state.phase is Phase.ENDING:
        return state, ()
    if transient and state.attempt < ATTEMPTS:
        return replace(state, attempt=state.attempt + 1), (Move(state.moved, state.moving, state.attempt + 1),)
    return _decide(state, _after_failure(state, cause))


def _go_on(state: Passage) -> Step:
    """The next range, if one is complete and none is on its way; the end of the passage when all have come."""
    if state.moves and state.moving is None and state.computed > state.moved:
        return replace(state, moving=state.computed, leased=True), (Move(state.moved, state.computed),)
    if state.phase is Phase.MOVING and state.moving is None:
        return _decide(state, Activate(state.length, None))
    return state, ()


def _decide(state: Passage, decision: Decision) -> Step:
    aborted = (AbortPrefill(),) if state.phase is Phase.PREFILL and state.prefill_holds else ()
    ending = replace(state, phase=Phase.ENDING, decision=decision)
    if state.moving is not None:
        return ending, (*aborted, StopMove())
    settled, actions = _settle(ending)
    return settled, (*aborted, *actions)


def _settle(state: Passage) -> Step:
    """Nobody writes: carries the decision out, then ends what the prompt's set holds."""
    assert state.decision is not None
    decided, state = (state.decision,), replace(state, decision=None, moving=None)
    if not state.prefill_holds:
        return replace(state, phase=Phase.OVER), decided
    if state.leased:
        return state, (*decided, EndLease())
    return replace(state, phase=Phase.OVER, prefill_holds=False), (*decided, FreePrefill())


def _stopped(state: Passage) -> Step:
    if state.phase is not Phase.ENDING or state.moving is None:
        raise Impossible(f"a move was stopped in {state.phase.name}")
    return _settle(state)


def _lease_ended(state: Passage) -> Step:
    if not state.prefill_holds:
        return state, ()
    if state.phase is not Phase.ENDING or state.moving is not None:
        raise Impossible(f"a lease ended in {state.phase.name}")
    return replace(state, phase=Phase.OVER, leased=False, prefill_holds=False), (FreePrefill(),)


def _prefill_lost(state: Passage, cause: str) -> Step:
    lost = replace(state, leased=False, prefill_holds=False)
    if state.phase is not Phase.ENDING:
        decided, actions = _decide(lost, _after_failure(state, cause))
        return decided, (*actions, ForgetMoves()) if state.leased and state.moving is None else actions
    return lost if state.moving is not None else replace(lost, phase=Phase.OVER), ()


def _left(state: Passage) -> Step:
    if state.phase is Phase.WAITING:
        return replace(state, phase=Phase.OVER), ()
    if state.phase is not Phase.ENDING:
        return _decide(state, Cancel())
    # A decision that was carried out is the output's set's business now.
    return (state if state.decision is None else replace(state, decision=Cancel())), ()


def _after_failure(state: Passage, cause: str) -> Decision:
    return Activate(state.moved, cause) if state.recompute else Fail(cause)
