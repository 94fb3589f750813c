"""The load on one cluster: what it asks, what it makes of the answers, and what it says of requests that fail."""

import json
import subprocess
import sys
import xml.etree.ElementTree
from argparse import Namespace
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from benchmarks import serve
from benchmarks.harness import run_benchmark
from benchmarks.load import Level
from benchmarks.serve import Run, asking, lines, main, measure, plot, rows_of
from cp_client.errors import Exhausted, InvalidRequest

ARGS = Namespace(up="-dp 2", target=None, new_tokens=4, runs=2, requests=3, vocabulary=256)


def answer(ttft_ms=1.0, tpot_ms=1.0, tokens=4):
    return SimpleNamespace(timing=SimpleNamespace(ttft_ms=ttft_ms, tpot_ms=tpot_ms), token_ids=[1] * tokens)


def rows():
    lone, both, none = Level(6, 1), Level(6, 2), Level(9, 1)
    return rows_of(
        {
            both: [Run([answer(tokens=8)] * 2, 1.0), Run([answer(tokens=8)], 2.0, Counter(UNAVAILABLE=1))],
            lone: [Run([answer(3.0)], 1.0), Run([answer(5.0)], 2.0)],
            none: [Run([], 1.0, Counter(UNAVAILABLE=1)), Run([], 1.0, Counter(UNAVAILABLE=1, RESOURCE_EXHAUSTED=2))],
        }
    )


def test_every_run_asks_every_level_and_no_prompt_twice():
    asked = []
    levels = [Level(5, 1), Level(7, 2)]
    found = measure(lambda prompt, salt: asked.append((salt, tuple(prompt))) or answer(), levels, ARGS, "s")
    assert {level: [len(run.answers) for run in runs] for level, runs in found.items()} == {
        levels[0]: [3, 3],
        levels[1]: [4, 4],
    }
    assert [len(prompt) for _, prompt in asked] == [5, 5, 5, 7, 7, 7, 7] * 2
    assert len({prompt for _, prompt in asked}) == 14 and len({salt for salt, _ in asked}) == 4


def test_a_request_that_fails_is_counted_by_its_code():
    def complete(token_ids, **options):
        assert (options["max_tokens"], options["ignore_eos"], options["temperature"]) == (4, True, 0)
        if token_ids[0] % 2:
            raise Exhausted("no room")
        return answer()

    found = measure(asking(SimpleNamespace(complete=complete), 4), [Level(5, 8)], ARGS, "s")
    runs = found[Level(5, 8)]
    failed = sum(run.errors["RESOURCE_EXHAUSTED"] for run in runs)
    assert 0 < failed < 16 and failed + sum(len(run.answers) for run in runs) == 16


def test_gains_are_ratios_within_a_run_against_the_fewest_at_once():
    both, lone, none = rows()
    assert both["gain"] == {"median": 3, "min": 2, "max": 4}
    assert lone["gain"] == {"median": 1, "min": 1, "max": 1}
    assert (both["answered"], both["errors"]) == (3, {"UNAVAILABLE": 1})
    assert lone["ttft_ms"] == {"median": 4, "min": 3, "max": 5}
    assert lone["output_tokens_per_s"] == {"median": 3, "min": 2, "max": 4}
    assert lone["tokens_per_s"] == {"median": 7.5, "min": 5, "max": 10}
    assert (none["answered"], none["errors"]) == (0, {"UNAVAILABLE": 2, "RESOURCE_EXHAUSTED": 2})
    assert none["ttft_ms"] is none["tpot_ms"] is none["gain"] is None


def test_summary_and_picture(tmp_path):
    head, both, _, none = lines(rows(), ARGS)
    assert head.startswith("kvloom up -dp 2: 4 new tokens, 2 runs") and head.endswith("against 1 at once")
    assert "gain 3.00 (2.00–4.00)×" in both and both.endswith("UNAVAILABLE 1")
    assert "TTFT – ms" in none and none.endswith("UNAVAILABLE 2, RESOURCE_EXHAUSTED 2")
    plot(rows(), tmp_path / "p.svg")
    text = "".join(xml.etree.ElementTree.parse(tmp_path / "p.svg").getroot().itertext())
    assert "prompts of 6" in text and "prompts of 9" in text and "requests at once" in text


@pytest.mark.parametrize(
    ("error", "status"), [(InvalidRequest("prompt", "9 tokens", "at most 8"), 2), (Exhausted("no room"), 1)]
)
def test_what_cannot_be_served_ends_it_before_anything_is_measured(error, status, monkeypatch, capsys):
    asked = []

    def complete(**options):
        asked.append(options)
        raise error

    @contextmanager
    def client(target):
        assert target == "127.0.0.1:9"
        yield SimpleNamespace(config=lambda: None, complete=complete)

    monkeypatch.setattr(serve, "Client", client)
    assert run_benchmark(lambda: main(["--target", "127.0.0.1:9", "--prompts", "9"])) == status
    assert capsys.readouterr().err == f"fatal: {error.message}\n" and len(asked) == 1


@pytest.mark.parametrize("words", [["--target", "nowhere"], ["--target", "a:1", "--up", "-dp 2"], ["--concurrency", "0"]])
def test_refusals(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2 and words[0] in capsys.readouterr().err


@pytest.mark.cluster
@pytest.mark.sweep
def test_a_cluster_of_its_own_answers_at_every_level(tmp_path):
    picture = tmp_path / "p.svg"
    command = [sys.executable, "-m", "benchmarks.serve", "--json", "--plot", str(picture), "--up", "-pcp 2 -dcp 2"]
    command += ["--prompts", "20", "--concurrency", "1,3", "--requests", "1", "--new-tokens", "4", "--runs", "1"]
    document = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout)
    assert (document["benchmark"], document["cluster"]["pcp"]) == ("serve", 2)
    assert [(row["concurrency"], row["answered"], row["errors"]) for row in document["rows"]] == [(1, 1, {}), (3, 3, {})]
    assert all(row["ttft_ms"]["median"] > 0 and row["output_tokens_per_s"]["median"] > 0 for row in document["rows"])
    assert picture.stat().st_size > 0
