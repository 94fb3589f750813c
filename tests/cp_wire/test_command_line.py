"""Refusals of command lines."""

import pytest

from cp_wire.command_line import CommandParser, ProcessParser


@pytest.mark.parametrize(("kind", "prefix"), [(CommandParser, "kvloom"), (ProcessParser, "fatal")])
def test_a_refusal_is_one_line(kind, prefix, capsys):
    parser = kind(prog="weave")
    parser.add_argument("--warp", choices=["a"])
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(["--warp", "b"])
    captured = capsys.readouterr()
    assert (stopped.value.code, captured.out) == (2, "")
    assert captured.err.startswith(f"{prefix}: argument --warp: invalid choice: 'b' ")
    assert captured.err.endswith(" (see weave --help)\n") and captured.err.count("\n") == 1


def test_the_line_stays_one_whatever_was_typed(capsys):
    parser = CommandParser(prog="weave")
    with pytest.raises(SystemExit):
        parser.parse_args(["two\nlines"])
    assert capsys.readouterr().err == "kvloom: unrecognized arguments: two lines (see weave --help)\n"


def test_the_commands_below_a_parser_refuse_alike(capsys):
    parser = ProcessParser(prog="weave")
    parser.add_subparsers().add_parser("loom").add_argument("--warp", type=int)
    with pytest.raises(SystemExit):
        parser.parse_args(["loom", "--warp", "x"])
    assert capsys.readouterr().err == "fatal: argument --warp: invalid int value: 'x' (see weave loom --help)\n"
