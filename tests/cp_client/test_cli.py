"""The command line itself: commands, their help, flags that several of them have, what each imports."""

import argparse
import subprocess
import sys

import pytest

from cp_client.cli import COMMANDS, build_parser, main
from tests.cp_client.fake_coordinator import DEADLINE_S


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        build_parser(command).parse_args([command, "--help"])
    assert stopped.value.code == 0
    assert f"kvloom {command}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["fly"], ["--fly"]])
def test_an_unknown_command_is_refused(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("kvloom: ") and err.endswith(" (see kvloom --help)\n") and err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "hi"],
        ["generate", "--target", "127.0.0.1:1", "--nonsense", "hi"],
        ["status", "--target", "127.0.0.1:1", "--json=1"],
        ["up", "--block-size", "0"],
        ["explain", "slots", "--positions", "\n"],
        ["check", "--tp"],
    ],
    ids=" ".join,
)
def test_a_wrong_word_is_refused_in_one_sentence(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    captured = capsys.readouterr()
    assert (stopped.value.code, captured.out) == (2, "")
    assert captured.err.startswith("kvloom: ") and captured.err.count("\n") == 1
    assert captured.err.endswith("--help)\n")


def is_menu(action):
    return isinstance(action, argparse._SubParsersAction)


def actions_of(parser):
    for action in parser._actions:
        yield from (each for sub in action.choices.values() for each in actions_of(sub)) if is_menu(action) else (action,)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_states_the_defaults(command):
    parsers = next(filter(is_menu, build_parser(command)._actions)).choices
    for action in actions_of(parsers[command]):
        if action.default not in (None, False, argparse.SUPPRESS) or (command == "up" and action.dest in ("tp", "http_port")):
            assert "default" in (action.help or ""), action.option_strings


@pytest.mark.parametrize("text", ["0", "-5", "nan", "inf", "soon", "1e9", ""])
@pytest.mark.parametrize("command", ["generate", "status"])
def test_a_timeout_is_a_time(command, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--target", "127.0.0.1:1", f"--timeout={text}", *(["hi"] if command == "generate" else [])])
    assert stopped.value.code == 2
    said = f"argument --timeout: {text!r} is not a number of seconds above 0 and at most 1000000"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["127.0.0.1:50051", "localhost:1", "[::1]:65535", "node-3.example:80"])
def test_a_target_is_host_and_port(text):
    assert build_parser("status").parse_args(["status", "--target", text]).target == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("localhost", "is not HOST:PORT such as"),
        (":50051", "is not HOST:PORT such as"),
        ("::1:50051", "is not HOST:PORT such as"),
        ("dns:///x:1", "is not HOST:PORT such as"),
        ("a b:1", "is not HOST:PORT such as"),
        ("h:0", "has port '0', it must be from 1 to 65535"),
        ("h:65536", "has port '65536', it must be from 1 to 65535"),
        ("h:", "has port '', it must be from 1 to 65535"),
        ("h:²", "has port '²', it must be from 1 to 65535"),
        ("unix:/tmp/s", "has port '/tmp/s', it must be"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "status"])
def test_anything_else_is_no_target(command, text, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--target", text, *(["hi"] if command == "generate" else [])])
    assert stopped.value.code == 2
    assert f"kvloom: argument --target: {text!r} {said}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["status", "--json"], ["generate", "hi"]], ids=" ".join)
def test_a_command_that_nobody_answers(words, capsys):
    assert main([*words, "--target", "127.0.0.1:1"]) == 1
    said = "kvloom: no kvloom coordinator answers at 127.0.0.1:1: is it running? `kvloom up` starts one\n"
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        ("explain", {"torch", "grpc", "google.protobuf", "rich", "model_files"}),
        ("check", {"torch", "grpc", "google.protobuf", "model_files"}),
        ("generate", {"torch", "model_files", "cp_layout", "numpy", "rich"}),
        ("status", {"torch", "model_files", "cp_layout", "numpy", "rich"}),
        ("up", {"torch", "transformers"}),
    ],
)
def test_a_command_imports_what_it_needs(command, absent):
    code = f"import sys; from cp_client.cli import build_parser; build_parser({command!r}); print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert not absent & set(done.stdout.split())
