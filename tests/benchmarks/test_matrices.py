"""Products with matrices, measured."""

import json
from argparse import ArgumentTypeError

import pytest
import torch

from benchmarks import matrices
from benchmarks.matrices import Case, measure, ways


@pytest.mark.parametrize(
    ("text", "case"), [("960x576", Case(960, 576)), ("gate1536x576", Case(1536, 576, True))], ids=["plain", "gated"]
)
def test_a_case_is_named_by_its_shape(text, case):
    assert Case.parse(text) == case
    assert str(case) == text


@pytest.mark.parametrize("text", ["", "5", "0x5", "5x0", "5x5x5", "gates5x5"])
def test_other_names_are_refused(text):
    with pytest.raises(ArgumentTypeError, match="FEATURESxINPUTS"):
        Case.parse(text)


@pytest.mark.parametrize("case", [Case(24, 40), Case(24, 40, True)], ids=str)
def test_ways_compute_such_products_over_cold_matrices(monkeypatch, case):
    monkeypatch.setattr(matrices, "COLD_BYTES", 10 * 2 * case.numbers)
    found = ways(case, 3)
    assert {"kvloom", "torch"} <= set(found)
    for way in found.values():
        assert way(0).shape == (3, 24)
        assert len({tuple(way(i).flatten().tolist()) for i in range(10)}) == 10
        assert torch.equal(way(10), way(0))


def test_figures_are_those_of_the_median(monkeypatch):
    clock = iter([0.0, 9.0, 0.0, 9.0, 0.0, 2.0, 0.0, 4.0])
    monkeypatch.setattr(matrices, "ways", lambda case, rows: {"kvloom": lambda i: None, "torch": lambda i: None})
    found = measure(Case(1000, 1000), 2, 1, lambda: next(clock))["ways"]
    assert found["torch"]["us"]["median"] == 4e6
    assert found["torch"]["kvloom_ratio"] == 0.5
    assert found["kvloom"]["kvloom_ratio"] == 1
    monkeypatch.undo()
    monkeypatch.setattr(matrices, "COLD_BYTES", 0)
    entry = measure(Case(8, 8), 2, 2, iter(x * 1e-6 for x in range(100)).__next__)["ways"]["kvloom"]
    assert (entry["gb_per_s"], entry["gflop_per_s"]) == (0.1, 0.3)


def test_it_prints_one_document(monkeypatch, capsys):
    monkeypatch.setattr(matrices, "COLD_BYTES", 0)
    monkeypatch.setattr(matrices.torch, "set_num_threads", lambda count: None)
    assert matrices.main(["--cases", "16x16,gate16x16", "--rows", "1,3", "--runs", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(entry["case"], entry["rows"]) for entry in document["cases"]] == [
        ("16x16", 1),
        ("gate16x16", 1),
        ("16x16", 3),
        ("gate16x16", 3),
    ]
