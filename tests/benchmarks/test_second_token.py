"""The benchmark of what a move costs, as small as it gets: what it prints, not how fast anything is."""

import json
import subprocess
import sys

import pytest

from benchmarks.second_token import row_of

FLAGS = ["--prompts", "300", "--runs", "1", "--up", "--threads-per-rank 1 --max-num-batched-tokens 64"]


def test_a_row_compares_the_medians_of_the_second_tokens() -> None:
    together = [{"first_ms": 9.0, "second_ms": ms} for ms in (10.0, 30.0, 20.0)]
    apart = [{"first_ms": 9.0, "second_ms": ms, "moved_before_first": 0.5, "moved_bytes": 7} for ms in (21.0, 22.0, 40.0)]
    row = row_of(300, {"together": together, "apart": apart})
    assert (row["tokens"], row["ratio"]) == (300, 1.1)
    assert row["together"]["second_ms"] == {"median": 20.0, "min": 10.0, "max": 30.0}
    assert row["apart"]["moved_before_first"]["median"] == 0.5


def test_a_prompt_that_was_computed_again_is_no_measurement() -> None:
    moved, computed = {"first_ms": 9.0, "second_ms": 21.0, "moved_before_first": 0.5, "moved_bytes": 7}, {"second_ms": 90.0}
    with pytest.raises(SystemExit, match="300 tokens did not come over"):
        row_of(300, {"together": [computed] * 2, "apart": [moved, computed]})


@pytest.mark.sweep
@pytest.mark.cluster
def test_chunks_move_while_later_ones_are_computed() -> None:
    command = [sys.executable, "-m", "benchmarks.second_token", *FLAGS, "--json"]
    document = json.loads(subprocess.run(command, capture_output=True, timeout=240, check=True).stdout)
    (row,) = document["rows"]
    assert (document["benchmark"], row["tokens"]) == ("second-token", 300)
    assert 0 < row["apart"]["moved_before_first"]["median"] < 1
    assert "moved_bytes" not in row["together"]
    assert all(row[way]["second_ms"]["min"] > row[way]["first_ms"]["min"] > 0 for way in ("together", "apart"))
