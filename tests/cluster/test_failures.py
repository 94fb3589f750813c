"""Ranks that die or freeze, starts that fail: bounded, reported, repaired."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from cp_client import errors
from tests.cluster.processes import KVLOOM, kvloom_up, members_of_session
from tests.tiny_models import build_tiny_llama, greedy_reference

pytestmark = pytest.mark.cluster

SHAPE = ["-pcp", "2", "-dcp", "2", "--block-size", "4", "--kv-cache-tokens-per-rank", "4096"]
SMALL_CHUNKS = ["--max-num-batched-tokens", "16"]
"""A prompt of thousands of tokens is hundreds of steps."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("model"), heads=8, kv_heads=2)


def serves_again(running, model, lost_pid) -> None:
    """Waits for a new rank 1 and a right answer."""

    def replaced() -> bool:
        ranks = running.status().ranks
        return all(rank.state == "ready" for rank in ranks) and ranks[1].pid != lost_pid

    running.wait_for(replaced, 60, "a new rank 1")
    running.wait_for(lambda: running.status().state == "serving", 60, "serving again")
    got = running.client.complete(token_ids=[1, 2, 3], max_tokens=8, temperature=0.0, ignore_eos=True)
    assert list(got.token_ids) == greedy_reference(model, [1, 2, 3], 8)
    assert running.all_blocks_free()


def ends_retryably(stream, limit_s: float) -> int:
    """Events until the stream fails with UNAVAILABLE, which names rank 1, within the limit."""
    start, count = time.monotonic(), 0
    with pytest.raises(errors.Unavailable) as caught:
        for _ in stream:
            count += 1
    assert time.monotonic() - start <= limit_s
    assert caught.value.retryable
    assert "rank 1" in str(caught.value)
    return count


def test_k8_l1_m1_a_rank_killed_in_decode_in_prefill_and_idle(model, tmp_path):
    with kvloom_up(str(model), *SHAPE, *SMALL_CHUNKS, log=tmp_path / "stderr") as running:
        survivor = running.rank_pids()[0]

        victim = running.rank_pids()[1]
        with running.client.generate(token_ids=[1, 2, 3], max_tokens=3000, ignore_eos=True) as stream:
            next(stream)
            os.kill(victim, signal.SIGKILL)
            ends_retryably(stream, 2.0)
        serves_again(running, model, victim)

        victim = running.rank_pids()[1]
        with running.client.generate(token_ids=[5] * 3500, max_tokens=10) as stream:
            running.wait_for(lambda: not running.all_blocks_free(), 30, "the prompt's first blocks")
            os.kill(victim, signal.SIGKILL)
            assert ends_retryably(stream, 2.0) == 0
        serves_again(running, model, victim)

        victim = running.rank_pids()[1]
        os.kill(victim, signal.SIGKILL)
        running.wait_for(lambda: running.status().state == "degraded", 2, "the loss in the status")
        serves_again(running, model, victim)

        assert running.rank_pids()[0] == survivor


def test_k8_l1_a_frozen_rank_ends_its_requests_and_is_replaced(model, tmp_path):
    with kvloom_up(str(model), *SHAPE, *SMALL_CHUNKS, log=tmp_path / "stderr") as running:
        survivor, victim = running.rank_pids()[0], running.rank_pids()[1]
        with running.client.generate(token_ids=[1, 2, 3], max_tokens=3000, ignore_eos=True) as stream:
            next(stream)
            os.kill(victim, signal.SIGSTOP)
            ends_retryably(stream, 10.0)
        serves_again(running, model, victim)

        victim = running.rank_pids()[1]
        with running.client.generate(token_ids=[5] * 3500, max_tokens=10) as stream:
            running.wait_for(lambda: not running.all_blocks_free(), 30, "the prompt's first blocks")
            os.kill(victim, signal.SIGSTOP)
            assert ends_retryably(stream, 10.0) == 0
        serves_again(running, model, victim)
        assert running.rank_pids()[0] == survivor


def up(*args: str, deadline_s: float = 60.0) -> tuple[int, str, str]:
    """Exit status and output of a start that fails; whatever it started has to be gone with it."""
    process = subprocess.Popen(
        [KVLOOM, "up", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=deadline_s)
        assert members_of_session(process.pid) == []
    finally:
        for pid in members_of_session(process.pid):
            os.kill(pid, signal.SIGKILL)
    return process.returncode, out, err


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
    assert (status, out) == (1, "")
    assert last_line(err) == (f"kvloom: coordinator failed to start: cannot listen on 127.0.0.1:{port}: address already in use")
    assert err.count("cannot listen") == 1


def test_k9_a_pool_beyond_all_memory_is_refused_before_a_process_starts(model):
    status, out, err = up(str(model), "--kv-cache-memory-bytes", "4000TiB", *SHAPE[:4])
    assert (status, out) == (2, "")
    assert err.startswith("kvloom: a KV pool of ") and err.count("\n") == 1


def test_k9_what_a_rank_refuses_ends_the_coordinator_with_its_sentence(model):
    """The rank is told of so many others on its host that its share of the memory holds no pool."""
    python = [sys.executable, "-m"]
    coordinator = subprocess.Popen(
        [*python, "coordinator", "--model", str(model), "--kv-cache-tokens-per-rank", "4096"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    rank = None
    try:
        assert coordinator.stdout is not None
        address = coordinator.stdout.readline().removeprefix("listening grpc=").strip()
        crowd = ["--ranks-on-host", str(2**32 - 1)]
        rank = subprocess.Popen(
            [*python, "rank_server", "--rank", "0", "--coordinator", address, "--model", str(model), *crowd]
        )
        out, err = coordinator.communicate(timeout=60)
        assert (coordinator.returncode, out) == (2, "")
        assert last_line(err).startswith("fatal: rank 0: ")
        assert "POOL_REFUSED: a KV pool of 256 blocks needs" in last_line(err)
        assert rank.wait(30) == 0
    finally:
        for process in (coordinator, rank):
            if process is not None:
                process.kill()
                process.wait()
