"""The benchmark of prefill over several ranks, as small as it gets: what it prints, not how fast anything is."""

import json
import subprocess
import sys

import pytest


@pytest.mark.cluster
@pytest.mark.sweep
def test_every_length_is_measured_in_every_way():
    command = [sys.executable, "-m", "benchmarks.prefill", "--json", "--prompts", "9,40", "--runs", "1"]
    document = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout)
    assert (document["benchmark"], document["pcp"], document["runs"]) == ("prefill", 2, 1)
    ways = ("one rank", "gather q", "gather kv", "copies")
    assert [(row["tokens"], row["way"]) for row in document["rows"]] == [(tokens, way) for tokens in (9, 40) for way in ways]
    for row in document["rows"]:
        assert row["ttft_ms"]["median"] > 0
        assert (row["speedup"] == 1) or row["way"] != "one rank"
