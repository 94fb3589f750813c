"""The rank as a process: what it refuses before it registers anywhere."""

import subprocess
import sys

import pytest

from rank_server.device import gpus

pytestmark = pytest.mark.cluster
DEADLINE_S = 60


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "x"], "argument --port: 'x' is not a whole number (see python -m rank_server --help)"),
        (["--host", "0.0.0.0"], "a rank needs an address that its peers can reach, not the wildcard '0.0.0.0'"),
        (["--device", "cuda"], f"device cuda is absent: {gpus()[1]}"),
        ([], "/nowhere/at/all: no such model, expected a directory with config.json or a GGUF file"),
    ],
)
def test_j2_one_sentence_and_status_2(words, said):
    command = [sys.executable, "-m", "rank_server", "--rank", "0", "--coordinator", "127.0.0.1:1", "--model", "/nowhere/at/all"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"fatal: {said}\n")
