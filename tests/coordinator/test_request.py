import pytest

from coordinator.plan import Sampling
from coordinator.request import TRANSITIONS, Event, IllegalTransition, Request, State


def make(prompt=(1, 2, 3), output=(4, 5)) -> Request:
    return Request(7, "r7", list(prompt), Sampling(), output=list(output))


def test_g5_every_state_and_event_has_a_defined_outcome():
    assert set(TRANSITIONS) == {(state, event) for state in State for event in Event}


@pytest.mark.parametrize(("state", "event"), list(TRANSITIONS))
def test_g5_each_pair_moves_or_is_refused_without_a_change(state, event):
    request = make()
    request.state = state
    if TRANSITIONS[state, event] is None:
        with pytest.raises(IllegalTransition, match=f"request 7 is {state.name}, {event.name}"):
            request.apply(event)
        assert request.state is state
    else:
        request.apply(event)
        assert request.state is TRANSITIONS[state, event]


def test_g5_every_state_is_left_for_good_by_an_end():
    for state in State:
        assert TRANSITIONS[state, Event.END] is State.FINISHED
    assert {TRANSITIONS[State.FINISHED, event] for event in Event} == {State.FINISHED, None}


def test_the_first_reason_of_an_end_stays():
    request = make()
    request.apply(Event.ADMIT)
    request.end(Event.END_IN_FLIGHT, "stop")
    request.end(Event.END_IN_FLIGHT, "abort")
    request.end(Event.END, "error", "rank 1 was lost")
    assert (request.state, request.finish_reason, request.error) == (State.FINISHED, "stop", None)


def test_known_tokens_are_prompt_then_output_in_every_cut():
    request = make()
    for start in range(6):
        for stop in range(start, 6):
            assert request.known(start, stop) == (1, 2, 3, 4, 5)[start:stop]
    assert request.num_known == 5


def test_f11_only_tokens_computed_before_count_as_recomputed():
    request = make()
    request.advance(3)
    request.advance(4)
    assert request.num_recomputed == 0
    request.num_computed = 2  # preempted, and resumed with two tokens from the prefix cache
    request.advance(3)
    assert request.num_recomputed == 1
    request.advance(5)
    assert (request.num_recomputed, request.max_computed) == (2, 5)
