"""Stop strings over a stream, against a plain search of the whole text."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.stop_strings import StopStrings


def plainly(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string to be completed (the longest of those), by looking at every prefix."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - len(max(hits, key=len))], True
    return text, False


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_any_cut_of_the_text_gives_the_same(pieces: list[str], stops: list[str]) -> None:
    watch = StopStrings(stops)
    seen = "".join([watch.feed(piece) for piece in pieces])
    assert (seen + watch.flush(), watch.stopped) == plainly("".join(pieces), stops)


@example("aaa", ["aa"], 2)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4), st.integers(0, 12))
def test_what_is_completed_in_unarmed_text_does_not_count(text: str, stops: list[str], unarmed: int) -> None:
    watch, expected = StopStrings(stops), (text, False)
    for end in range(unarmed + 1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            expected = text[: end - len(max(hits, key=len))], True
            break
    seen = "".join([watch.feed(character, armed=at >= unarmed) for at, character in enumerate(text)])
    assert (seen + watch.flush(), watch.stopped) == expected


@given(
    st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)
)
def test_text_is_held_back_only_while_it_may_begin_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    watch, seen, text = StopStrings(stops), "", ""
    for piece in pieces:
        seen, text = seen + watch.feed(piece), text + piece
        if watch.stopped:
            return
        held = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        assert seen == text[: len(text) - held]


def test_the_first_to_be_completed_wins_and_the_rest_is_dropped() -> None:
    watch = StopStrings(["abcd", "bc"])
    assert (watch.feed("xab"), watch.stopped) == ("x", False)
    assert (watch.feed("cd!"), watch.stopped) == ("a", True)
    assert (watch.feed("more"), watch.flush()) == ("", "")


def test_without_stop_strings_nothing_is_held() -> None:
    watch = StopStrings([])
    assert (watch.feed("abc"), watch.flush(), watch.stopped) == ("abc", "", False)


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopStrings(["a", ""])
