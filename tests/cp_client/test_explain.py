import argparse
import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from cp_client.explain import add_explain_parser

TRANSFER = ("transfer", "--tokens", "16", "--from", "cp=4,interleave=1,block=16", "--to", "cp=1,interleave=16,block=16")


def explain(*argv: str) -> int:
    parser = argparse.ArgumentParser(prog="kvloom")
    add_explain_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["explain", *argv])
    status: int = args.func(args)
    return status


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert explain(*argv, "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    facts: dict[str, Any] = json.loads(out)
    return facts


SLOTS = ("slots", "--block-size", "4", "--interleave", "2", "--cp", "2", "--block-table", "24,7", "--positions", "0,3,4,12")
LENGTHS = ("lengths", "--interleave", "2", "--cp", "2", "--block-size", "4", "--tokens", "9")
ZIGZAG = ("zigzag", "--pcp", "2", "--lengths", "8,5", "--computed", "5,0")
GROUPS = ("groups", "--tp", "2", "--pcp", "2", "--dcp", "4")


def test_slots_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys, *SLOTS) == {
        "cp": 2,
        "interleave": 2,
        "block_size": 4,
        "virtual_block_size": 8,
        "positions": [0, 3, 4, 12],
        "owner": [0, 1, 0, 0],
        "slots": [[96, -1, 98, 30], [-1, 97, -1, -1]],
    }


def test_lengths_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    facts = document(capsys, *LENGTHS)
    assert (facts["local_lens"], facts["blocks"], facts["virtual_blocks"]) == ([5, 4], [2, 1], 2)


def test_lengths_count_only_blocks_that_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    facts = document(capsys, "lengths", "--block-size", "128", "--cp", "8", "--tokens", "500")
    assert facts["local_lens"] == [128, 128, 128, 116, 0, 0, 0, 0]
    assert (facts["blocks"], facts["virtual_blocks"]) == ([1, 1, 1, 1, 0, 0, 0, 0], 1)
    assert facts["interleave"] == 128


def test_lengths_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    facts = document(capsys, "lengths", "--cp", "2", "--tokens", "0")
    assert (facts["local_lens"], facts["blocks"], facts["virtual_blocks"]) == ([0, 0], [0, 0], 0)


def test_groups_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys, *GROUPS) == {
        "world_size": 4,
        "tp": [[0, 1], [2, 3]],
        "pcp": [[0, 2], [1, 3]],
        "dcp": [[0, 2, 1, 3]],
    }


def test_transfer_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    facts = document(capsys, *TRANSFER)
    assert facts["moves"][:2] == [
        {"src": 0, "src_block": 0, "src_offset": 0, "dst": 0, "dst_block": 0, "dst_offset": 0, "count": 1},
        {"src": 0, "src_block": 0, "src_offset": 1, "dst": 0, "dst_block": 0, "dst_offset": 4, "count": 1},
    ]
    moved = {(m["src"], m["src_block"], m["src_offset"], m["dst"], m["dst_block"], m["dst_offset"]) for m in facts["moves"]}
    assert moved == {(token % 4, 0, token // 4, 0, 0, token) for token in range(16)}
    assert (facts["useful_tokens"], facts["sent_tokens"], facts["waste"]) == (16, 16, 0.0)
    assert facts["block_granular"] == {"sent_tokens": 64, "waste": 0.75}
    assert facts["virtual_block_granular"] == {"sent_tokens": 64, "waste": 0.75}


def test_transfer_with_defaults_moves_whole_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    facts = document(capsys, "transfer", "--tokens", "40", "--from", "cp=2", "--to", "block=32")
    assert (facts["from"], facts["to"]) == (
        {"cp": 2, "interleave": 16, "block": 16},
        {"cp": 1, "interleave": 32, "block": 32},
    )
    assert [(m["src"], m["src_block"], m["dst_block"], m["dst_offset"], m["count"]) for m in facts["moves"]] == [
        (0, 0, 0, 0, 16),
        (0, 1, 1, 0, 8),
        (1, 0, 0, 16, 16),
    ]
    assert facts["block_granular"] == {"sent_tokens": 48, "waste": pytest.approx(1 / 6)}


def test_transfer_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    facts = document(capsys, "transfer", "--tokens", "0", *TRANSFER[3:])
    assert (facts["moves"], facts["sent_tokens"], facts["waste"]) == ([], 0, 0.0)
    assert facts["block_granular"] == {"sent_tokens": 0, "waste": 0.0}


def test_d7_zigzag_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys, *ZIGZAG) == {
        "lengths": [8, 5],
        "computed": [5, 0],
        "ranks": [
            {
                "rows": [
                    {"request": 0, "start": 5, "length": 2},
                    {"request": 0, "start": 11, "length": 2},
                    {"request": 1, "start": 0, "length": 2},
                ],
                "positions": [5, 6, 11, 12, 0, 1],
            },
            {
                "rows": [{"request": 0, "start": 7, "length": 4}, {"request": 1, "start": 2, "length": 3}],
                "positions": [7, 8, 9, 10, 2, 3, 4],
            },
        ],
        "attention_pairs": [6 + 7 + 12 + 13 + 1 + 2, 8 + 9 + 10 + 11 + 3 + 4 + 5],
        "restore_index": [0, 1, 6, 7, 8, 9, 2, 3, 4, 5, 10, 11, 12],
    }


def test_d2_zigzag_of_single_tokens_goes_to_the_lightest(capsys: pytest.CaptureFixture[str]) -> None:
    facts = document(capsys, "zigzag", "--pcp", "3", "--lengths", "1,1,1,1")
    assert [[row["request"] for row in rank["rows"]] for rank in facts["ranks"]] == [[0, 3], [1], [2]]
    assert facts["attention_pairs"] == [2, 1, 1]


@pytest.mark.parametrize(
    "spelling",
    [
        ("-tp", "2", "-pcp", "2", "-dcp", "4", "-dp", "2"),
        ("--tp", "2", "--pcp", "2", "--dcp", "4", "--dp", "2"),
        (
            *("--tensor-parallel-size", "2", "--prefill-context-parallel-size", "2"),
            *("--decode-context-parallel-size", "4", "--data-parallel-size", "2"),
        ),
    ],
)
def test_every_spelling_of_the_sizes(capsys: pytest.CaptureFixture[str], spelling: tuple[str, ...]) -> None:
    facts = document(capsys, "groups", *spelling)
    assert facts["world_size"] == 8
    assert facts["dcp"] == [[0, 2, 1, 3], [4, 6, 5, 7]]


def test_long_name_of_the_interleave(capsys: pytest.CaptureFixture[str]) -> None:
    facts = document(capsys, "lengths", "--cp", "2", "--tokens", "5", "--cp-kv-cache-interleave-size", "4")
    assert facts["local_lens"] == [4, 1]


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (SLOTS, ["virtual block 8", "shard 1", "96", "−1"]),
        (LENGTHS, ["9 tokens over 2 shards", "unused slots", "█"]),
        (GROUPS, ["4 ranks", "[0, 2, 1, 3]", "replica"]),
        (TRANSFER, ["transfer of 16 tokens: cp 4, interleave 1, block 16 to cp 1", "75.0%", "whole blocks", "█████"]),
        (
            ZIGZAG,
            [
                "13 tokens of 2 requests over 2 members",
                "0: 5–6, 0: 11–12, 1: 0–1",
                "0━━━━━━━━━1━━━━━━━━━━━━━━━━━━━0━━━━━━━━━",
            ],
        ),
    ],
)
def test_drawing_and_picture_show_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: tuple[str, ...], shown: list[str]
) -> None:
    picture = tmp_path / "picture.svg"
    assert explain(*argv, "--svg", str(picture)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    text = "".join(xml.etree.ElementTree.parse(picture).getroot().itertext()).replace("\xa0", " ")
    for words in shown:
        assert words in out
        assert words in text


def test_wide_tables_are_not_folded(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain("slots", "--cp", "32", "--block-table", "9", "--positions", "500") == 0
    assert "shard 31" in capsys.readouterr().out


def test_json_stays_alone_on_stdout_beside_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    facts = document(capsys, *LENGTHS, "--svg", str(tmp_path / "l.svg"))
    assert facts["tokens"] == 9
    assert (tmp_path / "l.svg").stat().st_size > 0


def test_a_picture_in_a_directory_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "absent" / "l.svg"
    assert explain(*LENGTHS, "--svg", str(path)) == 2
    assert capsys.readouterr() == ("", f"kvloom: --svg is {path}: {path.parent} is not a directory\n")


def test_picture_that_cannot_be_written_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert explain(*LENGTHS, "--svg", str(tmp_path)) == 1
    assert capsys.readouterr().err.startswith("kvloom: cannot write ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("lengths", "--cp", "2", "--block-size", "16", "--interleave", "3", "--tokens", "9"),
            "interleave size 3 must divide block size 16",
        ),
        (
            ("lengths", "--cp", "2", "--block-size", "16", "--interleave", "32", "--tokens", "9"),
            "interleave size 32 must divide",
        ),
        (("zigzag", "--pcp", "0", "--lengths", "9"), "at least 1 member, got 0"),
        (("zigzag", "--pcp", "65537", "--lengths", "9"), "65537 members are more than the limit of 65536"),
        (("zigzag", "--pcp", "2", "--lengths", "9,0"), "at least 1 token after 0 or more, got 0 after 0"),
        (("zigzag", "--pcp", "2", "--lengths", "9,1", "--computed", "4"), "--computed names 1 request, --lengths 2"),
        (("zigzag", "--pcp", "2", "--lengths", "4194304,1"), "4194305 tokens is beyond the limit of 4194304"),
        (("lengths", "--cp", "0", "--tokens", "9"), "number of KV shards must be at least 1, got 0"),
        (("lengths", "--cp", "2", "--interleave", "0", "--tokens", "9"), "interleave size must be at least 1, got 0"),
        (("lengths", "--cp", "2", "--tokens", "-9"), "a length must be at least 0, got -9"),
        (("lengths", "--cp", "65537", "--tokens", "9"), "65537 KV shards are more than the limit of 65536"),
        (("slots", "--block-table", "5", "--positions", "16"), "block table of shard 0 has 1 columns, a position needs 2"),
        (("groups", "--tp", "4", "--pcp", "2", "--dcp", "3"), "dcp 3 must be 1 or a multiple of pcp 2"),
        (("groups", "--tp", "0"), "tp must be at least 1, got 0"),
        ((*TRANSFER[:4], "cp=2,interleave=3", *TRANSFER[5:]), "--from: interleave size 3 must divide block size 16"),
        ((*TRANSFER[:6], "cp=0"), "--to: the number of KV shards must be at least 1, got 0"),
        ((*TRANSFER[:6], "cp=65537"), "65537 KV shards are more than the limit of 65536"),
        (("transfer", "--tokens", "4194305", *TRANSFER[3:]), "4194305 tokens are more than the limit of 4194304"),
        (("transfer", "--tokens", "-1", *TRANSFER[3:]), "tokens [0, -1) are not a range"),
        (("groups", "--tp", "1024", "--dp", "65"), "66560 ranks (dp·pcp·tp) are more than the limit of 65536"),
    ],
)
def test_j2_refusals_are_one_sentence_and_exit_2(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    assert explain(*argv, "--json") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvloom: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("slots", "--block-table", "5", "--positions", "0,x"), "'x' is not an integer"),
        (("slots", "--block-table", "5", "--positions", "3,,4"), "'' is not an integer"),
        (("slots", "--block-table", "5", "--positions=-1,3"), "-1 is negative"),
        (("lengths", "--tokens", "1099511627777"), "1099511627777 is beyond the limit of 1099511627776"),
        (("lengths", "--tokens=-1099511627777"), "-1099511627777 is beyond the limit"),
        (("lengths",), "required: --tokens"),
        (TRANSFER[:5], "required: --to"),
        ((*TRANSFER[:6], "cp=4,tp=2"), "'tp=2' is not one of cp=NUMBER, interleave=NUMBER, block=NUMBER"),
        ((*TRANSFER[:6], "cp"), "'cp' is not one of"),
        ((*TRANSFER[:6], "cp=1,cp=2"), "cp is given twice"),
        ((*TRANSFER[:6], "cp=x"), "'x' is not an integer"),
        ((), "required: {slots,lengths,groups,zigzag,transfer}"),
    ],
)
def test_malformed_arguments_exit_2(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        explain(*argv)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_answers_without_torch_grpc_or_rich() -> None:
    script = (
        "import argparse, sys\n"
        "from cp_client.explain import add_explain_parser\n"
        "parser = argparse.ArgumentParser()\n"
        "add_explain_parser(parser.add_subparsers())\n"
        f"args = parser.parse_args(['explain', *{[*LENGTHS, '--json']!r}])\n"
        "args.func(args)\n"
        "print(sorted({'torch', 'grpc', 'google.protobuf', 'rich', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[1:] == ["[]"]
