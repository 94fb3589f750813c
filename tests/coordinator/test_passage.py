"""The life of a passage, as a table of events: every (phase, event) pair, and the two laws over random lives."""

import random

import pytest

from coordinator.passage import Impossible, Passage, Phase, advance
from coordinator.pd import (
    AbortPrefill,
    Activate,
    Cancel,
    Computed,
    EndLease,
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

LOST, FAILED, PASSING = PrefillLost("rank 1 is lost"), MoveFailed("CORRUPTED", False), MoveFailed("UNAVAILABLE", True)


def play(*events, state=None):
    """Actions of each event in turn, and the last state."""
    state, said = state or Passage(100), []
    for event in events:
        state, actions = advance(state, event)
        said.append(actions)
    return state, said


LIVES = {
    "one chunk": (
        [Reserved(0), Prefilled(), Moved(), LeaseEnded()],
        [(Prefill(),), (Move(0, 100),), (Activate(100, None), EndLease()), (FreePrefill(),)],
    ),
    "chunks move while later ones compute, those that come meanwhile are merged": (
        [Reserved(0), Computed(30), Computed(50), Computed(70), Moved(), Prefilled(), Moved(), Moved(), LeaseEnded()],
        [
            (Prefill(),), (Move(0, 30),), (), (), (Move(30, 70),), (), (Move(70, 100),), (Activate(100, None), EndLease()),
            (FreePrefill(),),
        ],
    ),
    "what the output's set has is not moved": (
        [Reserved(40), Computed(30), Computed(40), Computed(60), Moved(), Prefilled(), Moved()],
        [(Prefill(),), (), (), (Move(40, 60),), (), (Move(60, 100),), (Activate(100, None), EndLease())],
    ),
    "three attempts at a range, for causes that pass": (
        [Reserved(0), Computed(30), PASSING, Moved(), Prefilled(), PASSING, PASSING, PASSING, MoveStopped(), LeaseEnded()],
        [
            (Prefill(),), (Move(0, 30),), (Move(0, 30, 2),), (), (Move(30, 100),), (Move(30, 100, 2),), (Move(30, 100, 3),),
            (StopMove(),), (Activate(30, "UNAVAILABLE"), EndLease()), (FreePrefill(),),
        ],
    ),
    "a cause that stays, while the prompt is computed": (
        [Reserved(0), Computed(30), Moved(), Computed(60), FAILED, Prefilled(), MoveStopped(), LeaseEnded()],
        [
            (Prefill(),), (Move(0, 30),), (), (Move(30, 60),), (AbortPrefill(), StopMove()), (),
            (Activate(30, "CORRUPTED"), EndLease()), (FreePrefill(),),
        ],
    ),
    "the prompt's set is lost before anything moved": (
        [Reserved(0), LOST],
        [(Prefill(),), (Activate(0, "rank 1 is lost"),)],
    ),
    "the prompt's set is lost between moves": (
        [Reserved(0), Computed(30), Moved(), LOST],
        [(Prefill(),), (Move(0, 30),), (), (Activate(30, "rank 1 is lost"), ForgetMoves())],
    ),
    "the prompt's set is lost in the middle of a move": (
        [Reserved(0), Computed(30), Moved(), Prefilled(), LOST, Moved(), MoveStopped(), LeaseEnded()],
        [(Prefill(),), (Move(0, 30),), (), (Move(30, 100),), (StopMove(),), (), (Activate(30, "rank 1 is lost"),), ()],
    ),
    "the prompt's set is lost while the lease ends": (
        [Reserved(0), Prefilled(), Moved(), LOST, LeaseEnded()],
        [(Prefill(),), (Move(0, 100),), (Activate(100, None), EndLease()), (), ()],
    ),
    "h6 left before anything": ([Left(), Left()], [(), ()]),
    "left before the prompt runs": ([Reserved(0), Left()], [(Prefill(),), (AbortPrefill(), Cancel(), FreePrefill())]),
    "left in the middle of a move": (
        [Reserved(0), Computed(30), Left(), Computed(60), PASSING, Left(), MoveStopped(), LeaseEnded(), Left()],
        [(Prefill(),), (Move(0, 30),), (AbortPrefill(), StopMove()), (), (), (), (Cancel(), EndLease()), (FreePrefill(),), ()],
    ),
    "left between moves": (
        [Reserved(0), Computed(30), Moved(), Left(), LeaseEnded()],
        [(Prefill(),), (Move(0, 30),), (), (AbortPrefill(), Cancel(), EndLease()), (FreePrefill(),)],
    ),
    "left while a failed move is being stopped": (
        [Reserved(0), Prefilled(), FAILED, Left(), MoveStopped()],
        [(Prefill(),), (Move(0, 100),), (StopMove(),), (), (Cancel(), EndLease())],
    ),
    "left after it went on": (
        [Reserved(0), Prefilled(), Moved(), Left(), LeaseEnded()],
        [(Prefill(),), (Move(0, 100),), (Activate(100, None), EndLease()), (), (FreePrefill(),)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("life", LIVES)
def test_lives(life):
    events, expected = LIVES[life]
    state, said = play(*events)
    assert said == expected
    if said[-1] in ((FreePrefill(),), ()) or life.startswith(("left before", "the prompt's set is lost before")):
        assert state.phase is Phase.OVER


def test_the_policy_fail_ends_the_request_once_nobody_writes():
    state, said = play(Reserved(0), Computed(30), FAILED, MoveStopped(), LeaseEnded(), state=Passage(100, recompute=False))
    assert said[2:] == [(AbortPrefill(), StopMove()), (Fail("CORRUPTED"), EndLease()), (FreePrefill(),)]
    assert state.phase is Phase.OVER
    _, said = play(Reserved(0), LOST, state=Passage(100, recompute=False))
    assert said[1] == (Fail("rank 1 is lost"),)


def test_a_request_that_ends_with_its_first_token_moves_nothing():
    state, said = play(Reserved(0), Computed(30), Left(), state=Passage(100, moves=False))
    assert said == [(Prefill(),), (), (AbortPrefill(), Cancel(), FreePrefill())]
    assert state.phase is Phase.OVER
    with pytest.raises(Impossible):
        play(Reserved(0), Prefilled(), state=Passage(100, moves=False))


def test_without_a_set_for_prompts_it_is_computed_where_its_output_is():
    assert play(Reserved(16), LOST)[1][1] == (Activate(16, "rank 1 is lost"),)


W, P, M, E = Phase.WAITING, Phase.PREFILL, Phase.MOVING, Phase.ENDING
STATES = {
    "waiting": Passage(100),
    "prefill": Passage(100, phase=P, prefill_holds=True),
    "prefill, moving": Passage(100, phase=P, prefill_holds=True, leased=True, computed=30, moving=30),
    "moving": Passage(100, phase=M, prefill_holds=True, leased=True, computed=100, moving=100),
    "stopping": Passage(100, phase=E, prefill_holds=True, leased=True, computed=30, moving=30, decision=Cancel()),
    "stopping, prompts lost": Passage(100, phase=E, computed=30, moving=30, decision=Cancel()),
    "releasing": Passage(100, phase=E, prefill_holds=True, leased=True, computed=30),
}
IMPOSSIBLE = {
    Reserved(0): {"prefill", "prefill, moving", "moving", "stopping", "stopping, prompts lost", "releasing"},
    Computed(50): {"waiting", "moving"},
    Prefilled(): {"waiting", "moving"},
    Moved(): {"waiting", "prefill", "releasing"},
    PASSING: {"waiting", "prefill", "releasing"},
    FAILED: {"waiting", "prefill", "releasing"},
    MoveStopped(): {"waiting", "prefill", "prefill, moving", "moving", "releasing"},
    LeaseEnded(): {"prefill", "prefill, moving", "moving", "stopping"},
    LOST: set(),
    Left(): set(),
}


@pytest.mark.parametrize("event", IMPOSSIBLE, ids=str)
@pytest.mark.parametrize("name", STATES)
def test_g5_every_pair_of_state_and_event_has_an_outcome(name, event):
    if name in IMPOSSIBLE[event]:
        with pytest.raises(Impossible):
            advance(STATES[name], event)
    else:
        advance(STATES[name], event)


@pytest.mark.parametrize("event", IMPOSSIBLE, ids=str)
def test_h5_what_comes_after_the_end_changes_nothing(event):
    over = Passage(100, phase=Phase.OVER)
    assert advance(over, event) == (over, ())


@pytest.mark.parametrize("seed", range(300))
def test_laws_over_random_lives(seed):
    """Whatever happens when: one decision, no write beside it, and the prompt's blocks are freed exactly once, last."""
    rng = random.Random(seed)
    state = Passage(rng.randrange(1, 60), recompute=rng.random() < 0.5)
    writing = leased = held = lost = prefilled = False
    decided, freed, computed, stopping = [], 0, 0, False
    for _ in range(200):
        events = [Left()] if rng.random() < 0.05 else []
        if state.phase is Phase.WAITING:
            events.append(Reserved(rng.randrange(state.length)))
        if held and not prefilled and not lost and not decided and not stopping:
            events.append(Computed(rng.randrange(computed, state.length)) if rng.random() < 0.7 else Prefilled())
        if writing:
            events += [Moved(), PASSING, FAILED] if not stopping else [MoveStopped(), MoveFailed("CANCELLED", True)]
        if leased and decided:
            events.append(LeaseEnded())
        if held and not lost and rng.random() < 0.05:
            events.append(LOST)
        if not events:
            continue
        event = rng.choice(events)
        match event:
            case Computed(tokens):
                computed = tokens
            case Prefilled():
                prefilled = True
            case Moved() | MoveStopped():
                writing = False
            case PrefillLost():
                lost, leased, held = True, False, False
        state, actions = advance(state, event)
        for action in actions:
            match action:
                case Prefill():
                    held = True
                case Move(start, end):
                    assert start < end and not stopping and not decided
                    writing = leased = True
                case StopMove():
                    stopping = True
                case Activate() | Cancel() | Fail():
                    assert not writing
                    decided.append(action)
                case EndLease():
                    assert leased and decided
                case ForgetMoves():
                    assert lost and decided and not writing
                case FreePrefill():
                    assert held and decided
                    held, leased, freed = False, False, freed + 1
        if state.phase is Phase.OVER:
            break
    if state.phase is Phase.OVER:
        assert not writing and not held
        assert freed == (not lost and decided != [])
        assert len(decided) <= 1
