"""Log lines."""

import logging

import pytest

from cp_wire import logs


@pytest.fixture
def restore():
    root = logging.getLogger(logs.ROOT)
    before = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.level, root.propagate = before


def test_one_line_with_quoted_values(restore, capsys):
    logs.configure_logging("rank1")
    logs.configure_logging("rank1")
    logs.get_logger("worker").info("step done", ticket=7, ms=1.25, text='a "b"\nc', empty="")
    logs.get_logger("worker").debug("too fine")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    stamp, rest = lines[0].split(" ", 1)
    assert stamp.endswith("Z")
    assert rest == 'INFO rank1 step done ticket=7 ms=1.25 text="a \\"b\\"\\nc" empty=""'


def test_h18_an_error_shows_its_traceback(restore, capsys):
    logs.configure_logging("coordinator")
    try:
        raise KeyError("fox")
    except KeyError as error:
        logs.get_logger("engine").error("step failed", exc=error, rank=1)
    err = capsys.readouterr().err
    assert "ERROR coordinator step failed rank=1\nTraceback" in err
    assert "KeyError: 'fox'" in err
