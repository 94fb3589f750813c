"""The Makefile: what reaches the programs that it starts."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROMPT = """Say "it's" for $5, $(HOME) & `date`; \\ done?"""


@pytest.fixture
def elsewhere(tmp_path):
    """A copy of the Makefile whose environment is installed already: a `python` that prints its last argument."""
    home = tmp_path / "home"
    (home / ".venv/bin").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", home)
    (home / "pyproject.toml").touch()
    python = home / ".venv/bin/python"
    python.write_text('#!/bin/sh\nfor last; do :; done\nprintf \'%s|%s\' "$PWD" "$last"\n')
    python.chmod(0o755)
    (home / ".venv/.installed-rank").touch()
    return home


def make(*words, cwd, **environment):
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PROMPT"))}
    done = subprocess.run(["make", "-s", *words], cwd=cwd, env=own | environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_prompt_arrives_as_it_was_typed(elsewhere):
    assert make("demo", f"PROMPT={PROMPT}", cwd=elsewhere) == f"{elsewhere}|{PROMPT}"
    assert make("demo", cwd=elsewhere, PROMPT=PROMPT) == f"{elsewhere}|{PROMPT}"
    assert make("demo", cwd=elsewhere) == f"{elsewhere}|"


def test_it_works_from_elsewhere(elsewhere):
    said = make("-f", "home/Makefile", "demo", f"PROMPT={PROMPT}", cwd=elsewhere.parent)
    assert said == f"{elsewhere}|{PROMPT}"
