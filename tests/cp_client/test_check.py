import argparse
from pathlib import Path

import pytest

from cp_client.check import add_check_parser


def check(*argv: str) -> int:
    parser = argparse.ArgumentParser(prog="kvloom")
    add_check_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["check", *argv])
    status: int = args.func(args)
    return status


def heads(queries: int, keys: int) -> tuple[str, ...]:
    return ("--num-attention-heads", str(queries), "--num-key-value-heads", str(keys))


@pytest.mark.parametrize(
    ("argv", "summary"),
    [
        (
            (),
            "ok: 1 rank (dp 1, pcp 1, tp 1), dcp 1 with d 1, block size 16, interleave 16, virtual block 16, heads not judged",
        ),
        (
            ("--tp", "4", "--pcp", "2", "--dcp", "4", *heads(8, 2)),
            "dcp 4 with d 2, block size 16, interleave 16, virtual block 64",
        ),
        (("-tp", "4", "-dcp", "2", "-dp", "2", *heads(8, 2)), "ok: 8 ranks (dp 2, pcp 1, tp 4), dcp 2 with d 2"),
        (("-pcp", "3", "-dcp", "3", "--block-size", "3", *heads(8, 8)), "interleave 3, virtual block 9, 8 Q heads, 8 KV heads"),
        (("-pcp", "2", "-dcp", "2", "--cp-kv-cache-interleave-size", "4"), "block size 16, interleave 4, virtual block 32"),
        (("-tp", "8", "-pcp", "2", "-dcp", "16", "--mla", "--num-attention-heads", "16"), "16 Q heads, latent attention"),
        (("-tp", "8", "-dcp", "8", "--mla"), "latent attention"),
    ],
)
def test_accepted_configurations(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], summary: str) -> None:
    assert check(*argv) == 0
    out, err = capsys.readouterr()
    assert summary in out and out.count("\n") == 1
    assert err == ""


def test_both_sides_are_judged(capsys: pytest.CaptureFixture[str]) -> None:
    sides = ("--prefill-ranks", "4", "--prefill.tp", "2", "--prefill.pcp", "2", "--decode-ranks", "1")
    assert check(*sides, "--prefill.dcp", "4", "--prefill.cp-kv-cache-interleave-size", "1", *heads(8, 1)) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("ok: prefill: 4 ranks (dp 1, pcp 2, tp 2), dcp 4 with d 2, block size 16, interleave 1,")
    assert second.startswith("ok: decode: 1 rank (dp 1, pcp 1, tp 1), dcp 1")
    for more, message in (
        (("--prefill.dcp", "4", *heads(8, 2)), "kvloom: prefill side: dcp 4 with tp 2, pcp 2"),
        (("--decode.tp", "2"), "kvloom: the decode side has 1 rank (--decode-ranks), its shape needs dp·pcp·tp = 2"),
        (("--decode.kv-cache-tokens-per-rank", "9"), "kvloom: decode side: a KV pool of 9 tokens per rank holds no block"),
    ):
        assert check(*sides, *more) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(message) and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("--tp", "4", "--dcp", "4", *heads(8, 2)),
            "TP/KVH = 4/2 = 2 ranks hold each of 2 KV heads: TP/KVH must be a multiple of d",
        ),
        (("--tp", "6", "--dcp", "2", *heads(12, 2)), "d = 2 TP ranks on one KV head, but TP/KVH = 6/2 = 3"),
        (("--tp", "4", "--dcp", "2", *heads(8, 4)), "puts d = 2 TP ranks on one KV head"),
        (("--tp", "3", "--dcp", "3", *heads(8, 1)), "8 Q heads cannot be cut over tp 3"),
        (("--tp", "4", *heads(24, 6)), "tp 4 and 6 KV heads must divide one another"),
        (("--tp", "8", "--mla", "--num-attention-heads", "12"), "12 Q heads cannot be cut over tp 8"),
        (("--tp", "4", "--pcp", "2", "--dcp", "3"), "dcp 3 must be 1 or a multiple of pcp 2"),
        (("--tp", "3", "--dcp", "2", "--mla"), "tp 3 must be a multiple of d = 2"),
        (
            ("--pcp", "2", "--dcp", "2", "--block-size", "16", "--interleave", "3"),
            "interleave size 3 must divide block size 16",
        ),
        (("--block-size", "0"), "block size must be at least 1, got 0"),
        (("--num-attention-heads", "8"), "give both or neither"),
        (("--num-key-value-heads", "8"), "give both or neither"),
        (("model-dir", *heads(8, 2)), "give either MODEL or head counts (or --mla), not both"),
        (("model-dir", "--mla"), "give either MODEL or head counts (or --mla), not both"),
    ],
)
def test_j2_refused_configurations_name_the_law(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    assert check(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvloom: ") and message in err and err.count("\n") == 1


def test_it_approves_of_nothing_that_cannot_be_started(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check("-tp", "8", "-dcp", "8", "--mla", "--dcp-q-replicate")
    assert "unrecognized arguments: --dcp-q-replicate" in capsys.readouterr().err


def test_kv_heads_and_latent_attention_exclude_one_another(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        check("--mla", "--num-key-value-heads", "2")
    assert exit_.value.code == 2
    assert "not allowed with argument --mla" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert check(str(tmp_path / "absent")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvloom: ") and err.count("\n") == 1


def test_heads_come_from_the_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Shape:
        num_heads, num_kv_heads, mla = 12, 2, None

    class Files:
        shape = Shape()

    opened: list[str] = []
    monkeypatch.setattr("model_files.open_model", lambda path: opened.append(path) or Files())
    assert check("tiny-owl", "--tp", "6", "--dcp", "3") == 0
    assert "12 Q heads, 2 KV heads" in capsys.readouterr().out
    assert check("tiny-owl", "--tp", "6", "--dcp", "2") == 2
    assert "TP/KVH = 6/2 = 3" in capsys.readouterr().err
    assert opened == ["tiny-owl", "tiny-owl"]


def test_a_model_with_latent_attention_is_judged_by_its_own_law(capsys: pytest.CaptureFixture[str], tiny) -> None:  # type: ignore[no-untyped-def]
    path = str(tiny(family="deepseek_v2"))
    assert check(path, "--tp", "4", "--pcp", "2", "--dcp", "8") == 0
    assert "8 Q heads, latent attention" in capsys.readouterr().out
    assert check(path, "--tp", "3") == 2
    assert "8 Q heads cannot be cut over tp 3" in capsys.readouterr().err
