"""Which code a child process runs: that of its parent, wherever it was started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cp_client import interpreter
from cp_client.child import POOL_WAIT, child_environment
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


def test_benchmarks_do_not_look_into_the_current_directory(trap):
    command = [sys.executable, "-P", "-m", "cp_client.cli", "bench", "layout", "--help"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--seeds" in done.stdout


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


def test_pools_wait_awake_for_a_moment_unless_the_user_wants_otherwise(monkeypatch):
    for name in POOL_WAIT:
        monkeypatch.delenv(name, raising=False)
    found = child_environment(2)
    assert {name: found[name] for name in POOL_WAIT} == {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
    assert found["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "0")])
def test_who_says_anything_of_waiting_says_all_of_it(monkeypatch, name, value):
    """A count of looks would override the policy."""
    for each in POOL_WAIT:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    found = child_environment(2)
    assert {each: found.get(each) for each in POOL_WAIT} == dict.fromkeys(POOL_WAIT) | {name: value}
