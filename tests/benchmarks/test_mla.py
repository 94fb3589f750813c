"""What the benchmark of latent attention computes from its measurements."""

import pytest

from benchmarks import mla
from benchmarks.chooser import Cell, Taken
from benchmarks.mla import DC, DR, NEW_TOKENS, POSITIONS, WORDS, reorganisation, write_model
from cp_layout.cost import Rates
from model_files import open_model


def test_a_copy_is_measured_against_a_clone() -> None:
    row = reorganisation(100, 2, 4, 3)
    assert row["ratio"]["min"] <= row["ratio"]["median"] <= row["ratio"]["max"]
    assert row["ms"]["reorg"]["min"] / row["ms"]["clone"]["max"] <= row["ratio"]["median"] * 1.01


def test_only_the_parts_that_are_asked_for_are_measured(monkeypatch, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    """The gathers are those of the chooser, over words that the seeded model has; decode is compared in turn."""
    asked = []

    def gathers(path, cells, runs, words):  # type: ignore[no-untyped-def]
        asked.append((cells, runs, words))
        taken = Taken({"q": [12.0], "kv": [10.0], "auto": [10.0]})
        taken.chosen["kv"] = 1
        return {cells[0]: taken}, {cells[0]: {"q": 3.0, "kv": 1.0}}, Rates()

    def compared(sides, context, new_tokens, runs, words):  # type: ignore[no-untyped-def]
        asked.append((list(sides), context, new_tokens, runs, words))
        ms = {"kvloom": {"median": 1.0}, "transformers": {"median": 2.0}, "ratio": 0.5}
        return {"context": context, "ttft_ms": ms, "tpot_ms": ms}

    monkeypatch.setattr(mla, "write_model", lambda directory: directory)
    monkeypatch.setattr(mla.chooser, "found_and_predicted", gathers)
    monkeypatch.setattr(mla, "measure", compared)
    monkeypatch.setattr(mla, "of_transformers", lambda path: None)
    monkeypatch.setattr(mla, "of_rank", lambda *sizes: None)
    assert mla.main(["--parts", "gathers", "--grid", "8x64", "--runs", "2"]) == 0
    assert asked == [([Cell(8, 64)], 2, WORDS)]
    out = capsys.readouterr().out
    assert "8 new tokens: queries travel from no, predicted no cached tokens on" in out.replace("measured ", "")
    assert mla.main(["--parts", "decode", "copies", "--context", "50", "--runs", "1"]) == 0
    assert asked[1:] == [(["transformers", "kvloom"], 50, NEW_TOKENS, 1, WORDS)]
    out = capsys.readouterr().out
    assert "a further token, 50 of context: 1.0 ms against 2.0 (× 0.500)" in out
    assert out.count("of a copy") == 4


def test_the_model_is_one_that_a_rank_opens(tmp_path) -> None:  # type: ignore[no-untyped-def]
    shape = open_model(write_model(tmp_path)).shape
    assert (shape.kv_bytes_per_token(1, "bfloat16"), shape.moe) == (4 * (DC + DR) * 2, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grid", "8x64,100"], "100 cached tokens are not a multiple of 32"),
        (["--context", str(POSITIONS - NEW_TOKENS + 1)], f"{POSITIONS - NEW_TOKENS + 1} is outside [1,"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(words, said, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(mla, "write_model", lambda directory: pytest.fail("a model was written"))
    with pytest.raises(SystemExit) as stopped:
        mla.main(words)
    assert stopped.value.code == 2 and said in capsys.readouterr().err
