"""The benchmarks that others script against: their names, the flags that all have, the pictures of the small ones."""

import runpy
import sys
import xml.etree.ElementTree
from importlib import import_module

import pytest

from benchmarks import decode, harness, layout, transfer
from cp_client.bench_command import BENCHMARKS
from cp_client.errors import InvalidRequest, Unavailable

FIXED = ("pd-waste", "transfer", "prefill", "decode", "serve", "layout")


REFUSED = InvalidRequest("prompt", "9000 tokens", "at most 8191 tokens (max_model_len − 1)")


def text_of(picture):
    return "".join(xml.etree.ElementTree.parse(picture).getroot().itertext())


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_name_is_there_and_takes_the_flags_of_all(name, capsys):
    assert name in BENCHMARKS
    with pytest.raises(SystemExit) as stopped:
        import_module(f"benchmarks.{name.replace('-', '_')}").main(["--help"])
    said = capsys.readouterr().out
    assert stopped.value.code == 0 and "--json" in said and "--plot FILE" in said


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize(("answer", "status"), [(REFUSED, 2), (Unavailable("a rank was lost"), 1)], ids=["refused", "failed"])
def test_what_a_cluster_answers_instead_of_a_result_is_one_sentence(name, answer, status, monkeypatch, capsys):
    def refuse(*args: object, **options: object) -> None:
        raise answer

    # All of them make their parser first.
    monkeypatch.setattr(harness, "parser", refuse)
    module = f"benchmarks.{name.replace('-', '_')}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(module, run_name="__main__")
    assert (stopped.value.code, capsys.readouterr().err) == (status, f"fatal: {answer.message}\n")


def test_layout_draws_a_line_per_interleave(tmp_path, capsys):
    assert layout.main(["--seeds", "1", "--plot", str(tmp_path / "p.svg")]) == 0
    text = text_of(tmp_path / "p.svg")
    assert "interleave 1" in text and "interleave 16" in text and "N 2 interleave" in capsys.readouterr().out


def test_decode_draws_the_times_by_context(tmp_path):
    times = {key: {"median": ms} for key, ms in {"tpot_ms": 9.0, "rank_ms": 8.0, "overhead_ms": 1.0}.items()}
    decode.plot([{"context": 512, **times}, {"context": 64, **times}], tmp_path / "p.svg")
    text = text_of(tmp_path / "p.svg")
    assert all(word in text for word in ("per token", "slowest rank", "overhead", "512", "64"))


def test_transfer_draws_every_repetition(tmp_path):
    transfer.plot([{"name": "one way", "runs_gib_per_s": [1.5, 2.0, 1.0]}], tmp_path / "p.svg")
    points = next(xml.etree.ElementTree.parse(tmp_path / "p.svg").getroot().iter("{http://www.w3.org/2000/svg}polyline"))
    assert "one way" in text_of(tmp_path / "p.svg") and len(points.get("points").split()) == 3


def test_decode_compares_two_clusters_by_context():
    runs = {"tpot_ms": 12.0, "rank_ms": 10.0}, {"tpot_ms": 8.0, "rank_ms": 9.0}, {"tpot_ms": 9.0, "rank_ms": 7.0}
    mine = decode.entries_of({64: runs, 512: [runs[0]]})
    assert mine[0] == {
        "context": 64,
        "tpot_ms": {"median": 9.0, "min": 8.0, "max": 12.0},
        "rank_ms": {"median": 9.0, "min": 7.0, "max": 10.0},
    }
    others = decode.entries_of({64: [{"tpot_ms": 6.0}], 512: [{"tpot_ms": 16.0}]})
    assert decode.ratios(mine, others) == [(64, 1.5), (512, 0.75)]
