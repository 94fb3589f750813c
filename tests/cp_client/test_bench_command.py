"""`kvloom bench`: it hands its words on, and what the benchmarks do with them and with signals."""

import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from cp_client.bench_command import BENCHMARKS
from tests.cp_client.fake_coordinator import DEADLINE_S
from tests.machine import children_of


@pytest.mark.parametrize(("flag", "status"), [("--help", 0), ("--nonsense", 2)])
def test_bench_hands_its_words_on(flag, status):
    command = [sys.executable, "-m", "cp_client.cli", "bench", "layout", flag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == status
    assert "--seeds" in done.stdout or status


def test_every_benchmark_has_its_name_on_the_command_line():
    sources = (Path(__file__).parents[2] / "benchmarks").glob("*.py")
    modules = {path.stem for path in sources if "\ndef main(" in path.read_text()}
    assert {name.replace("-", "_") for name in BENCHMARKS} == modules


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("layout --block-size 0", "--block-size: 0 is outside [1, "),
        ("layout --seeds -1", "--seeds: -1 is outside [1, "),
        ("decode --contexts 512,0", "--contexts: 0 is outside [1, "),
        ("decode --runs 0", "--runs: 0 is outside [1, "),
        ("decode --new-tokens 2", "--new-tokens: 2 is outside [3, "),
        ("collectives --members 1", "--members: 1 is outside [2, "),
        ("collectives --sizes 8,x", "--sizes: 'x' is not a whole number"),
    ],
)
def test_a_benchmark_refuses_what_it_cannot_measure(words, said, capsys):
    name, *flags = words.split()
    with pytest.raises(SystemExit) as stopped:
        import_module(f"benchmarks.{name}").main(flags)
    err = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said in err and err.count("\n") == 1


def test_a_benchmark_that_is_told_to_go_takes_all_it_has_started_along():
    """Everything it has started holds its standard error."""
    command = [sys.executable, "-m", "cp_client.cli", "bench", "transfer", "--mib", "1", "--runs", "100000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + DEADLINE_S
        while len(children_of(process.pid)) < 4:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        process.terminate()
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 128 + signal.SIGTERM
