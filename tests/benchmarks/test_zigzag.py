"""The two cuts that are compared, and what is made of their times."""

import json
from argparse import ArgumentTypeError

import pytest
import torch

from benchmarks import zigzag
from benchmarks.zigzag import Attention, Case, compared, cpu_ms, cuts


def positions(pieces):
    return [position for start, length in pieces for position in range(start, start + length)]


def test_both_cuts_deal_every_token_once():
    found = cuts(Case(8, 5), 2)
    assert [positions(pieces) for pieces in found["zigzag"]] == [[5, 6, 11, 12], [7, 8, 9, 10]]
    assert [positions(pieces) for pieces in found["contiguous"]] == [[5, 6, 7, 8], [9, 10, 11, 12]]
    for members in (2, 3, 5):
        for each in cuts(Case(7, 3), members).values():
            assert sorted(position for pieces in each for position in positions(pieces)) == list(range(3, 10))


def test_members_with_fewer_tokens_than_members_are_empty():
    assert sorted(map(len, cuts(Case(1, 0), 2)["contiguous"])) == [0, 1]
    attention = Attention(Case(1, 0))
    assert attention.of([])()[0].shape[0] == 0


def test_rows_see_what_they_would_see_alone():
    attention = Attention(Case(40, 20))
    out, _ = attention.of([(20, 10), (50, 10)])()
    for rows, piece in ((slice(0, 10), (20, 10)),):
        alone, _ = attention.of([piece])()
        torch.testing.assert_close(out[rows], alone, rtol=0.02, atol=0.02)
    longer, _ = attention.of([(21, 10)])()
    assert not torch.allclose(out[:10], longer, rtol=0.02, atol=0.02)


def test_a_group_waits_for_its_slowest_member():
    row = compared(Case(4, 0), {"zigzag": [4.0, 5.0], "contiguous": [2.0, 8.0]})
    assert (row["ratio"], row["zigzag"]["spread"], row["contiguous"]["slowest_ms"]) == (1.6, 0.2, 8.0)


def test_the_least_time_counts_and_the_first_pass_does_not(monkeypatch):
    clock = iter([0, 0, 0.009, 0, 0.007])
    monkeypatch.setattr(zigzag.time, "thread_time", lambda: next(clock))
    assert cpu_ms({"zigzag": [lambda: None]}, 2) == {"zigzag": [pytest.approx(7)]}


@pytest.mark.parametrize("text", ["512", "0@1", "1x2@3", "5@-1"])
def test_a_case_that_is_none_is_refused(text):
    with pytest.raises(ArgumentTypeError, match="is not QUERIES@CONTEXT"):
        Case.parse(text)


def test_a_document(capsys, monkeypatch):
    monkeypatch.setattr(zigzag.torch, "set_num_threads", lambda count: None)
    assert zigzag.main(["--cases", "64@0,32@64", "--runs", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in document["rows"]] == ["64@0", "32@64"]
    assert all(row["ratio"] > 0 and len(row["zigzag"]["member_ms"]) == 2 for row in document["rows"])
