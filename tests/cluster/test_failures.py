"""Ranks that die or freeze, starts that fail: bounded, reported, repaired."""

import os
import signal
import socket
import subprocess
import time

import pytest

from cp_client import errors
from tests.cluster.processes import KVLOOM, kvloom_up
from tests.tiny_models import build_tiny_llama, greedy_reference

pytestmark = pytest.mark.cluster

SHAPE = ["-pcp", "2", "-dcp", "2", "--block-size", "4", "--kv-cache-tokens-per-rank", "4096"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("model"), heads=8, kv_heads=2)


@pytest.mark.parametrize(("number", "limit_s"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 10.0)], ids=["killed", "frozen"])
def test_k8_l1_m1_a_lost_rank_ends_its_requests_and_the_cluster_serves_again(model, tmp_path, number, limit_s):
    with kvloom_up(str(model), *SHAPE, log=tmp_path / "stderr") as running:
        before = running.rank_pids()
        with running.client.generate(token_ids=[1, 2, 3], max_tokens=3000, ignore_eos=True) as stream:
            next(stream)
            os.kill(before[1], number)
            start = time.monotonic()
            with pytest.raises(errors.Unavailable) as caught:
                for _ in stream:
                    pass
            took = time.monotonic() - start
        assert caught.value.retryable
        assert "rank 1" in str(caught.value)
        assert took <= limit_s

        def replaced() -> bool:
            ranks = running.status().ranks
            return all(rank.state == "ready" for rank in ranks) and ranks[1].pid != before[1]

        running.wait_for(replaced, 60, "a new rank 1")
        running.wait_for(lambda: running.status().state == "serving", 60, "serving again")
        got = running.client.complete(token_ids=[1, 2, 3], max_tokens=8, temperature=0.0, ignore_eos=True)
        assert list(got.token_ids) == greedy_reference(model, [1, 2, 3], 8)
        assert running.all_blocks_free()
        assert running.rank_pids()[0] == before[0]


def up(*args: str, deadline_s: float = 60.0) -> tuple[int, str, str]:
    done = subprocess.run([KVLOOM, "up", *args], capture_output=True, text=True, timeout=deadline_s, check=False)
    return done.returncode, done.stdout, done.stderr


def last_line(err: str) -> str:
    return err.strip().splitlines()[-1]


def test_a_missing_model_is_one_line(tmp_path):
    status, out, err = up(str(tmp_path / "nowhere"))
    assert (status, out) == (2, "")
    assert "nowhere" in last_line(err)


def test_truncated_weights_are_refused_before_anything_starts(tmp_path):
    path = build_tiny_llama(tmp_path / "model")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    status, out, err = up(str(path))
    assert (status, out) == (2, "")
    assert "model.safetensors" in last_line(err)


def test_illegal_shapes_exit_2_before_a_process_starts(model):
    for flags, word in (
        (["-tp", "4", "-dcp", "4"], "dcp"),
        (["-tp", "3"], "8 Q heads"),
        (["-pcp", "2", "-dcp", "3"], "dcp 3"),
        (["-pcp", "2", "-dcp", "2", "--cp-kv-cache-interleave-size", "3"], "interleave size 3"),
    ):
        status, out, err = up(str(model), *flags)
        assert (status, out) == (2, ""), err
        assert word in last_line(err)
        assert len(err.strip().splitlines()) == 1


def test_k9_a_port_in_use_is_one_clear_line(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, out, err = up(str(model), "--port", str(port))
    assert (status != 0, out) == (True, "")
    assert str(port) in last_line(err)


def test_k9_a_rank_that_fails_at_start_ends_the_launcher_with_its_error(model):
    status, out, err = up(str(model), "--kv-cache-memory-bytes", "4TiB", *SHAPE[:4])
    assert (status != 0, out) == (True, "")
    assert "rank" in last_line(err)
    assert "4398046511104" in last_line(err) or "blocks" in last_line(err)
