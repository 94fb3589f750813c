"""How loading looks: bars on a terminal, seldom a line elsewhere."""

import io
import logging

import pytest
from rich.console import Console

from cp_client.loading import LINE_INTERVAL_S, Lines, display, loaded
from cp_wire.pb import coordinator_pb2 as pb


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=80, color_system=None)


def test_a_rank_that_has_not_come_is_not_loading():
    ranks = [pb.RankStatus(rank=0, state="loading", load_fraction=0.5), pb.RankStatus(rank=1, state="absent")]
    assert loaded(pb.GetStatusResponse(ranks=ranks)) == {0: 0.5}


def test_a_terminal_shows_one_bar_for_each_rank():
    terminal = console(True)
    with display(terminal) as show:
        show({0: 0.0, 1: 0.25})
        show({0: 0.5, 1: 0.75})
    drawn = terminal.file.getvalue()
    for words in ("rank 0 loads its weights", "rank 1 loads its weights", " 50%", " 75%"):
        assert words in drawn


def test_elsewhere_nothing_is_drawn():
    pipe = console(False)
    with display(pipe) as show:
        show({0: 0.5})
    assert isinstance(show, Lines)
    assert pipe.file.getvalue() == ""


@pytest.fixture
def lines(caplog):
    """lines(at, fractions) → what was logged for it."""
    now = 100.0
    show = Lines(lambda: now)

    def tell(at, fractions):
        nonlocal now
        now = 100.0 + at
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="kvloom"):
            show(fractions)
        return [(record.getMessage(), record.fields) for record in caplog.records]

    logging.getLogger("kvloom").propagate = True
    return tell


def test_a_line_now_and_then(lines):
    assert lines(0.0, {0: 0.0}) == []
    assert lines(LINE_INTERVAL_S - 0.1, {0: 0.2}) == []
    assert lines(LINE_INTERVAL_S, {0: 0.25, 1: 0.5}) == [("ranks load their weights", {"loaded": "0:25% 1:50%"})]
    assert lines(LINE_INTERVAL_S + 1, {0: 0.3}) == []
    assert lines(2 * LINE_INTERVAL_S, {0: 0.9, 1: 1.0}) == [("ranks load their weights", {"loaded": "0:90% 1:100%"})]


def test_no_line_when_everything_is_loaded(lines):
    assert lines(10 * LINE_INTERVAL_S, {0: 1.0, 1: 1.0}) == []
