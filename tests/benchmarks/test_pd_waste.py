"""The waste that the benchmark reports, and its picture."""

import json
import xml.etree.ElementTree

import pytest

from benchmarks.pd_waste import UNITS, main


def run(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_sixteen_tokens_over_four_shards(capsys):
    one, whole = run(capsys, "--tokens", "16", "--block-sizes", "16", "--cp", "4", "--bytes-per-token", "65536")
    assert (one["interleave"], whole["interleave"]) == (1, 16)
    assert [one[unit]["waste"] for unit in UNITS] == [0.75, 0.75, 0]
    assert [whole[unit]["waste"] for unit in UNITS] == [0.75, 0, 0]
    assert (one["runs"], whole["runs"]) == (16, 1)
    assert one["token_exact"] == {"sent_tokens": 16, "waste": 0, "bytes": 1 << 20, "messages": 4}
    assert whole["token_exact"]["messages"] == 1
    assert one["block_granular"]["messages"] == 4 and one["block_granular"]["bytes"] == 4 << 20


def test_hundred_tokens_over_eight_shards(capsys):
    one, whole = run(capsys, "--tokens", "100", "--block-sizes", "128", "--cp", "8")
    assert round(one["block_granular"]["waste"], 2) == 0.90
    assert round(whole["block_granular"]["waste"], 2) == 0.22


def test_an_interleave_is_left_out_where_it_does_not_divide_the_block(capsys):
    rows = run(capsys, "--tokens", "9", "--block-sizes", "4,6", "--cp", "1,2", "--interleaves", "3")
    assert [(row["block_size"], row["cp"], row["interleave"]) for row in rows] == [(4, 1, 4), (6, 1, 6), (6, 2, 3)]


def test_summary_and_picture(capsys, tmp_path):
    picture = tmp_path / "waste.svg"
    assert main(["--tokens", "16,64", "--block-sizes", "16", "--cp", "4", "--plot", str(picture)]) == 0
    head, columns, *body = capsys.readouterr().out.splitlines()
    assert head.startswith("23040 bytes per token") and columns.split()[:5] == ["tokens", "block", "cp", "I", "runs"]
    assert len(body) == 4 and "75.0%" in body[0]
    text = "".join(xml.etree.ElementTree.parse(picture).getroot().itertext())
    assert "blocks, I 1, cp 4" in text and "blocks, I = B, any cp" in text and "tokens, any layout" in text


@pytest.mark.parametrize("words", [["--tokens", "0"], ["--cp", "0"], ["--block-sizes", "x"]])
def test_refusals(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "is outside" in capsys.readouterr().err or words[1] == "x"
