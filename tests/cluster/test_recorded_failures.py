"""A rank that dies or freezes while its peers play recorded passes: as bounded and as well repaired as in Python's."""

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.processes import kvloom_up
from tests.cluster.test_failures import ends_retryably
from tests.tiny_models import build_tiny_llama

pytestmark = pytest.mark.cluster

FLAGS = ["--block-size", "4", "--kv-cache-tokens-per-rank", "4096", "--dtype", "bfloat16"]
ROOT = Path(__file__).parents[2]
NOTES = "TEST_TAPES"
# Read by every Python process at its start: ranks say that they have played a tape.
SITE = f"""
import os, sys
if "rank_server" in sys.orig_argv:
    from rank_server.compiled.tape import Tape
    run, told = Tape.run, []
    def noted(self, *arguments):
        run(self, *arguments)
        if not told:
            told.append(1)
            with open(os.environ["{NOTES}"], "a") as notes:
                notes.write(f"{{os.getpid()}}\\n")
    Tape.run = noted
"""


@pytest.mark.parametrize(
    ("shape", "signum", "limit_s"),
    [("-pcp 2 -dcp 2", signal.SIGKILL, 2.0), ("-pcp 2 -dcp 2", signal.SIGSTOP, 10.0), ("-tp 2", signal.SIGKILL, 2.0)],
)
def test_k8_a_rank_lost_while_tapes_run_ends_its_requests_and_is_replaced(tmp_path, monkeypatch, shape, signum, limit_s):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    notes = tmp_path / "notes"
    notes.touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(ROOT)]))
    monkeypatch.setenv(NOTES, str(notes))
    model = build_tiny_llama(tmp_path / "model", hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=128)
    with kvloom_up(str(model), *shape.split(), *FLAGS, log=tmp_path / "stderr") as running:

        def played() -> bool:
            return {str(pid) for pid in running.rank_pids().values()} <= set(notes.read_text().split())

        def answer() -> list[int]:
            got = running.client.complete(token_ids=[1, 2, 3], max_tokens=12, temperature=0.0, ignore_eos=True)
            return list(got.token_ids)

        first, pids = answer(), running.rank_pids()
        assert played()
        with running.client.generate(token_ids=[1, 2, 3], max_tokens=3000, ignore_eos=True) as stream:
            for _ in range(3):
                next(stream)
            os.kill(pids[1], signum)
            ends_retryably(stream, limit_s)
        running.wait_for(lambda: running.rank_pids()[1] != pids[1] and running.status().state == "serving", 60, "a new rank 1")
        again = answer()
        assert played() and len(again) == len(first)
        # Replicas share out passes in more than one way, each with roundings of its own; the clock decides which.
        assert "-pcp" in shape or again == first
        assert running.rank_pids()[0] == pids[0]
        assert running.all_blocks_free()
