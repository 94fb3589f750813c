"""The benchmarks of one rank, as small as they get: what they compute and print, not how fast anything is."""

import json

import pytest

from benchmarks import compare, memory
from benchmarks.one_rank import OneRank
from model_files import open_model
from tests.tiny_models import greedy_reference


def test_a_rank_alone_answers_request_after_request(tiny):
    path = tiny()
    rank = OneRank(open_model(path), 160, dtype="float32", chunk=5)
    for length in (3, 130, 4):
        prompt = [(7 * i + length) % 300 for i in range(length)]
        tokens, first, further = rank.generate(prompt, 6)
        assert tokens == greedy_reference(path, prompt, 6)
        assert first > 0
        assert len(further) == 5


def test_both_sides_are_compared_at_every_context(tiny, capsys, monkeypatch):
    monkeypatch.setattr(compare.torch, "set_num_threads", lambda count: None)
    flags = ["--model", str(tiny()), "--contexts", "9,33", "--new-tokens", "3", "--runs", "2", "--json"]
    monkeypatch.setattr(compare, "WORDS", range(300))
    assert compare.main(flags) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["context"] for row in document["rows"]] == [9, 33]
    for row in document["rows"]:
        for kind in ("ttft_ms", "tpot_ms"):
            ours, theirs = (row[kind][side]["median"] for side in ("kvloom", "transformers"))
            assert row[kind]["ratio"] == pytest.approx(ours / theirs, abs=0.01)


def test_memory_is_what_is_left_beside_weights_and_pool(tiny, capsys, monkeypatch):
    monkeypatch.setattr(memory.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(memory, "resident_bytes", iter([100_000_000, 400_000_000, 500_000_000]).__next__)
    monkeypatch.setattr(memory, "WORDS", range(300))
    assert memory.main(["--model", str(tiny()), "--context", "20", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["resident_bytes"].values()) == [100_000_000, 400_000_000, 500_000_000]
    assert document["beside_bytes"] == 500_000_000 - document["weight_bytes"] - document["pool_bytes"]


def test_resident_memory_grows_with_what_is_touched():
    before = memory.resident_bytes()
    held = bytearray(b"x" * (64 << 20))
    assert memory.resident_bytes() - before > len(held) // 2
