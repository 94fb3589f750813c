"""The benchmark of prefill over several ranks, as small as it gets: what it computes and prints, not how fast anything is."""

import json
import subprocess
import sys
import xml.etree.ElementTree
from types import SimpleNamespace

import pytest

from benchmarks.prefill import ONE_RANK, Taken, lines, plot, rows_of, ways
from cp_client.cli import build_parser
from cp_client.up_command import cluster_spec
from tests.model_files.tiny_checkpoint import write_gguf


def rows():
    return rows_of({(9, ONE_RANK): Taken([10.0, 30.0, 20.0]), (9, "gather q"): Taken([8.0], rank_s=0.5, collective_s=0.02)})


def test_the_ways_are_one_rank_and_as_many_as_asked_for(tmp_path, monkeypatch):
    model = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("cp_client.up_command.default_model_path", lambda: model)
    ranks = {way: cluster_spec(build_parser("up").parse_args(["up", *up.split()])).num_ranks for way, up in ways(3).items()}
    assert ranks == {ONE_RANK: 1, "gather q": 3, "gather kv": 3, "copies": 3}


def test_speedups_are_ratios_of_medians_and_communication_one_of_sums():
    one, other = rows()
    assert (one["speedup"], other["speedup"]) == (1, 2.5)
    assert (one["communication"], other["communication"]) == (0, 0.04)


def test_steps_are_those_between_two_looks_at_the_status():
    totals = iter([(1.0, 0.25), (3.0, 0.75)])

    def status():
        rank_s, collective_s = next(totals)
        return SimpleNamespace(step_times=SimpleNamespace(total_rank_s=rank_s, total_collective_s=collective_s))

    timing = SimpleNamespace(ttft_ms=7.0)
    client = SimpleNamespace(status=status, complete=lambda **options: SimpleNamespace(timing=timing))
    taken = Taken()
    taken.take(client, 9, 1)
    assert (taken.ttft_ms, taken.communication) == ([7.0], 0.25)


def test_summary_and_picture(tmp_path):
    said = "\n".join(lines(rows(), SimpleNamespace(pcp=2, runs=3)))
    assert "2.50×" in said and "collectives 4.0%" in said
    plot(rows(), 2, tmp_path / "p.svg")
    text = "".join(xml.etree.ElementTree.parse(tmp_path / "p.svg").getroot().itertext())
    assert ONE_RANK in text and "gather q" in text


@pytest.mark.cluster
@pytest.mark.sweep
def test_every_length_is_measured_in_every_way():
    command = [sys.executable, "-m", "benchmarks.prefill", "--json", "--prompts", "9,40", "--runs", "1"]
    document = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout)
    assert (document["benchmark"], document["pcp"], document["runs"]) == ("prefill", 2, 1)
    assert [(row["tokens"], row["way"]) for row in document["rows"]] == [(tokens, way) for tokens in (9, 40) for way in ways(2)]
    for row in document["rows"]:
        assert row["ttft_ms"]["median"] > 0
        assert (row["speedup"] == 1) or row["way"] != ONE_RANK
        assert 0 < row["communication"] < 1 or row["way"] == ONE_RANK
