"""One default cluster for all tests that only ask it things."""

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.cluster.processes import KVLOOM, RunningCluster, kvloom_up
from tests.machine import free_port


@pytest.fixture(scope="package")
def metrics_port() -> int:
    """Where `smollm2` serves its metrics; nothing listened there a moment ago."""
    return free_port()


@pytest.fixture(scope="package")
def smollm2(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[RunningCluster]:
    """SmolLM2 in fp32 on two ranks, KV interleaved by 4 tokens, 64 blocks each."""
    log = tmp_path_factory.mktemp("smollm2") / "stderr"
    flags = ["--dtype", "float32", "--cp-kv-cache-interleave-size", "4", "--kv-cache-tokens-per-rank", "1024"]
    flags += ["--metrics-port", str(metrics_port)]
    with kvloom_up("-pcp", "2", "-dcp", "2", *flags, "--max-num-seqs", "4", "--max-model-len", "1800", log=log) as running:
        yield running


@pytest.fixture
def kvloom():
    """kvloom("status", …) → (exit status, stdout, stderr)."""

    def run(*args: str, deadline_s: float = 60.0) -> tuple[int, str, str]:
        done = subprocess.run([KVLOOM, *args], capture_output=True, text=True, timeout=deadline_s, check=False)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def kvloom_json(kvloom):
    """The one JSON document that a command with --json prints."""

    def run(*args: str) -> dict:
        status, out, err = kvloom(*args, "--json")
        assert status == 0, err
        return json.loads(out)

    return run
