"""Which code a child process runs: that of its parent, wherever it was started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cp_client import interpreter
from cp_client.bench_command import bench
from cp_client.child import child_environment
from cp_client.cli import build_parser
from cp_client.interpreter import same_code_environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A current directory with modules that must not be imported."""
    for name in ("random", "cp_wire", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the current directory was imported')")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("module", ["coordinator", "rank_server"])
def test_the_processes_of_a_cluster_do_not_look_into_the_current_directory(trap, module):
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, env=child_environment(1), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_benchmarks_do_not_look_into_the_current_directory(trap, capfd):
    assert bench(build_parser("bench").parse_args(["bench", "layout", "--help"])) == 0
    assert "--seeds" in capfd.readouterr().out


def test_a_child_runs_the_code_of_its_parent(trap):
    code = "import cp_wire, os; print(os.path.dirname(os.path.dirname(cp_wire.__file__)))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=same_code_environment({}), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == str(ROOT)


def test_a_search_path_of_ones_own_comes_after_it():
    assert same_code_environment({"PYTHONPATH": "/a"})["PYTHONPATH"] == f"{ROOT}{os.pathsep}/a"


def test_installed_packages_stay_behind_the_standard_library(monkeypatch, tmp_path):
    monkeypatch.setattr(interpreter, "PACKAGE_ROOT", tmp_path)
    monkeypatch.setattr(interpreter.site, "getsitepackages", lambda: [str(tmp_path)])
    assert same_code_environment({"X": "1"}) == {"X": "1", "PYTHONSAFEPATH": "1"}


def test_pools_sleep_while_they_wait_unless_the_user_wants_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert child_environment(2)["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert child_environment(2)["OMP_WAIT_POLICY"] == "ACTIVE"
    assert child_environment(2)["OMP_NUM_THREADS"] == "2"
