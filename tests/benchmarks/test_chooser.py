"""What the benchmark of the gather choice makes of its measurements."""

import json
import subprocess
import sys
import xml.etree.ElementTree
from argparse import ArgumentTypeError
from collections import Counter
from types import SimpleNamespace

import pytest

from benchmarks.chooser import Cell, Prediction, Taken, agree, ask, crossovers, grid, measure, plot, scatter, summary, verdict
from benchmarks.crossings import crossover
from cp_layout.cost import Rates
from cp_wire.pb import common_pb2, coordinator_pb2
from tests.model_files.tiny_checkpoint import write_gguf


def taken(q, kv, *chosen):
    return Taken({"q": q, "kv": kv, "auto": q}, Counter(chosen))


def test_the_crossover_lies_between_the_contexts_around_it():
    assert crossover([100, 200, 300], [30.0, 30.0, 30.0], [10.0, 20.0, 40.0]) == 250
    assert crossover([100, 200], [5.0, 5.0], [10.0, 20.0]) == 100
    assert crossover([100, 200], [50.0, 50.0], [10.0, 20.0]) is None


def test_a_grid_is_all_pairs_ascending():
    assert grid("64,32x0,128,0") == [Cell(32, 0), Cell(32, 128), Cell(64, 0), Cell(64, 128)]


@pytest.mark.parametrize("text", ["32", "32x0x1", "0x0", "32x-1", "ax0", "", "32x32,48"])
def test_a_grid_that_is_none_is_refused(text):
    with pytest.raises(ArgumentTypeError):
        grid(text)


def test_ways_agree_when_they_are_closer_than_they_scatter():
    assert scatter([1.0, 2.0, 3.0, 4.0, 5.0]) == 2
    assert scatter([7.0]) == 0
    assert agree([9.0, 10.0, 11.0], [10.5, 10.6, 10.7])
    assert not agree([9.9, 10.0, 10.1], [10.5, 10.6, 10.7])
    # One outlier of seven is no scatter.
    assert not agree([10.0] * 6 + [30.0], [12.0] * 7)


@pytest.mark.parametrize(
    ("q", "kv", "right", "loss"),
    [
        ([10.0] * 3, [12.0] * 3, True, 0),
        ([10.9] * 3, [10.0] * 3, True, 0.09),
        ([11.2] * 3, [10.0] * 3, False, 0.12),
        ([9.0, 12.0, 15.0], [10.0] * 3, True, 0.2),
    ],
)
def test_a_choice_is_right_within_a_tenth_or_where_nobody_could_tell(q, kv, right, loss):
    found = verdict(taken(q, kv, "q", "kv", "q"))
    assert (found["chosen"], found["right"]) == ("q", right)
    assert found["loss"] == pytest.approx(loss)


def gathered(**steps):
    names = {"q": common_pb2.GATHER_Q, "kv": common_pb2.GATHER_KV, "none": common_pb2.GATHER_NONE}
    counts = [coordinator_pb2.StepCount(gather=names[name], steps=count) for name, count in steps.items()]
    return coordinator_pb2.GetStatusResponse(step_counts=counts)


class FakeClient:
    """Computes every prompt in one step of 20 ms, after the cached tokens it is told."""

    def __init__(self, way: str, cached: int | None = None, steps: int = 1) -> None:
        self.way, self.cached, self.steps = way, cached, steps
        self.done, self.prompts = 0, []

    def status(self):
        status = gathered(none=self.done, **{self.way: self.done})
        status.step_times.total_rank_s = 0.02 * self.done
        return status

    def complete(self, token_ids, **options):
        self.done += self.steps
        self.prompts.append(token_ids)
        cached = len(token_ids) - 4 if self.cached is None else self.cached
        return SimpleNamespace(usage=SimpleNamespace(cached_tokens=cached))


def test_a_cell_is_one_step_of_its_size():
    cell = Cell(4, 32)
    assert ask(FakeClient("kv"), cell, [1] * 36) == (pytest.approx(20), "kv")
    for client in (FakeClient("q", cached=0), FakeClient("q", steps=2)):
        with pytest.raises(SystemExit, match=r"4 tokens after 32 went into [12] step"):
            ask(client, cell, [1] * 36)


def test_every_way_gets_the_same_prompts_and_the_first_round_does_not_count():
    clients = {"q": FakeClient("q"), "kv": FakeClient("kv"), "auto": FakeClient("kv")}
    found = measure(clients, [Cell(4, 0), Cell(4, 32)], 2, range(100, 300))
    assert {len(times) for each in found.values() for times in each.ms.values()} == {2}
    assert all(each.chosen == {"kv": 2} for each in found.values())
    first, *others = (client.prompts for client in clients.values())
    assert all(other == first for other in others) and len(first) == 1 + 3 * 2
    assert len({tuple(prompt) for prompt in first}) == len(first)


def test_predictions_take_the_rates_that_the_cluster_tells(tmp_path):
    model = write_gguf(tmp_path / "tiny.gguf")
    sizes = {"tp": 1, "pcp": 2, "dcp": 2, "dp": 1}
    config = common_pb2.ClusterConfig(**sizes, dtype="float32", kv_cache_dtype="float32", merge=common_pb2.MERGE_A2A)
    told = dict.fromkeys(Rates._fields, 0.0) | {"wire_byte": 1e-3}
    link = coordinator_pb2.LinkStatus(rates=coordinator_pb2.WorkRates(**told))
    prediction = Prediction(model, config, coordinator_pb2.GetStatusResponse(links=[link]))
    near, far = (prediction.ms(Cell(64, context)) for context in (0, 4096))
    assert near["q"] == far["q"] > near["kv"] and far["kv"] > far["q"]


def document():
    found = {Cell(32, 0): taken([12.0] * 3, [10.0] * 3, "kv"), Cell(32, 64): taken([12.0] * 3, [14.0] * 3, "kv")}
    predicted = {Cell(32, 0): {"q": 3.0, "kv": 1.0}, Cell(32, 64): {"q": 3.0, "kv": 2.0}}
    return found, predicted


def test_crossovers_are_measured_and_predicted_for_each_chunk():
    assert crossovers(*document()) == [{"new": 32, "measured": 32, "predicted": None}]


def test_picture_and_summary(tmp_path):
    found, predicted = document()
    plot(found, predicted, tmp_path / "p.svg")
    text = "".join(xml.etree.ElementTree.parse(tmp_path / "p.svg").getroot().itertext())
    assert "32 new, measured" in text and "32 new, predicted" in text
    rows = [
        {"new": 32, "context": 64, "ms": {way: {"median": 1.0} for way in ("q", "kv")}, "predicted_ms": predicted[Cell(32, 64)]}
        | verdict(found[Cell(32, 64)])
    ]
    said = "\n".join(summary({"rows": rows, "right": 0.0, "crossovers": crossovers(found, predicted)}))
    assert "chosen kv +16.7% !" in said and "right in 0% of 1 cell" in said
    assert "queries travel from measured 32, predicted no cached tokens on" in said


@pytest.mark.cluster
@pytest.mark.sweep
def test_a_cell_is_measured_in_every_way():
    command = [sys.executable, "-m", "benchmarks.chooser", "--json", "--grid", "8x0,32", "--runs", "1"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout)
    assert [(row["new"], row["context"]) for row in found["rows"]] == [(8, 0), (8, 32)]
    for row in found["rows"]:
        assert row["chosen"] in ("q", "kv") and all(row["ms"][way]["median"] > 0 for way in ("q", "kv", "auto"))
        assert all(row["predicted_ms"][way] > 0 for way in ("q", "kv"))
    assert found["rates"]["round"] > 0
