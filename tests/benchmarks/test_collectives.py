"""The benchmark of collectives, as small as it gets: what it prints, not how fast anything is."""

import json
import subprocess
import sys

import pytest

FLAGS = ["--members", "3", "--sizes", "12,4096", "--blocks", "2", "--calls", "2"]


def run(*words: str) -> str:
    command = [sys.executable, "-m", "benchmarks.collectives", *FLAGS, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.cluster
def test_every_operation_and_size_is_compared_under_both_backends():
    document = json.loads(run("--json"))
    assert (document["benchmark"], document["members"], document["calls"]) == ("collectives", 3, 4)
    operations = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    assert [(row["op"], row["bytes"]) for row in document["rows"]] == [(op, size) for op in operations for size in (12, 4096)]
    for row in document["rows"]:
        assert 0 < row["shm_us"]["p10"] <= row["shm_us"]["median"]
        assert row["ratio"] == pytest.approx(row["shm_us"]["median"] / row["gloo_us"]["median"], rel=0.01, abs=1e-4)


@pytest.mark.cluster
@pytest.mark.sweep
def test_the_summary_has_a_line_per_operation_and_size():
    heading, *lines = run().splitlines()
    assert heading.startswith("3 members, 4 calls each")
    assert len(lines) == 8
    assert all("gloo" in line and "shm/gloo" in line for line in lines)
