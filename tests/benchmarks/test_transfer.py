"""The benchmark of transfers, as small as it gets: what it prints, not how fast anything is."""

import json
import subprocess
import sys

import pytest

FLAGS = ["--mib", "1", "--planes", "4", "--kv-heads", "2", "--head-bytes", "64", "--runs", "2", "--message-bytes", "262144"]


@pytest.mark.cluster
def test_every_way_is_compared_with_the_bare_stream():
    command = [sys.executable, "-m", "benchmarks.transfer", *FLAGS]
    document = json.loads(subprocess.run([*command, "--json"], capture_output=True, timeout=120, check=True).stdout)
    assert (document["benchmark"], document["payload_bytes"]) == ("transfer", 1 << 20)
    bare, kept, moving, whole, single, shared = document["rows"]
    assert [row["way"] for row in document["rows"]] == ["bare", "bare_kept", "moving", "whole", "single", "shared"]
    assert all(len(row["runs_gib_per_s"]) == 2 for row in document["rows"])
    assert bare["ratio"] == kept["ratio_kept"] == moving["ratio_moving"] == 1
    assert all(row["source_cpu_us_per_mib"] > 0 and row["target_cpu_us_per_mib"] > 0 for row in document["rows"])
    assert (whole["messages"], single["messages"]) == (4, 4)
    assert (whole["shared_bytes"], shared["shared_bytes"]) == (0, 1 << 20)
    assert all(row["gib_per_s"]["min"] > 0 and row["retries"] == 0 for row in (whole, single, shared))
