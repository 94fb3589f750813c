"""The benchmark of shapes under load: what it asks, and the table it makes of the answers."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks.load import Level, Taken
from benchmarks.shapes import SHAPES, VOCABULARY, main, measure, row_of, table, up_flags, write_model
from cp_client.cli import build_parser
from cp_client.up_command import cluster_spec
from cp_layout.grid import Grid
from cp_layout.laws import check_heads
from model_files import open_model


def answer(ttft_ms, tpot_ms, tokens):
    return SimpleNamespace(timing=SimpleNamespace(ttft_ms=ttft_ms, tpot_ms=tpot_ms), token_ids=[1] * tokens)


def test_the_model_runs_in_every_shape_and_the_pools_hold_every_level(tmp_path):
    model = write_model(tmp_path)
    shape = open_model(model).shape
    assert (shape.num_heads, shape.vocab_size, shape.kv_bytes_per_token(1, "bfloat16")) == (8, VOCABULARY, 4096)
    levels = [Level(100, 4), Level(50, 16)]
    for name in SHAPES:
        flags = up_flags(name, levels, 32)
        args = build_parser("up").parse_args(["up", str(model), *flags])
        assert cluster_spec(args).num_ranks == 2
        check_heads(Grid(args.tp, args.pcp, args.dcp, args.dp), shape.num_heads, shape.num_kv_heads)
        holds = args.kv_cache_tokens_per_rank * (args.dp * args.pcp)
        assert holds >= 16 * 132


def test_a_level_is_asked_until_there_are_enough_requests():
    asked = {"dp": [], "tp": []}

    def asking(shape):
        def ask(prompt, salt):
            asked[shape].append((tuple(prompt), salt))
            return answer(1.0, 1.0, 2)

        return ask

    found = measure({shape: asking(shape) for shape in asked}, [Level(5, 1), Level(7, 4)], 3)
    assert {key: len(taken.answers) for key, taken in found.items()} == {
        (Level(5, 1), "dp"): 3, (Level(5, 1), "tp"): 3, (Level(7, 4), "dp"): 4, (Level(7, 4), "tp"): 4,
    }  # fmt: skip
    assert sorted(asked["dp"]) == sorted(asked["tp"])
    assert len({prompt for prompt, _ in asked["dp"]}) == 3 + 4


def test_throughput_counts_all_tokens_over_the_whole_time():
    taken = Taken([answer(10.0, 2.0, 5), answer(30.0, 4.0, 5), answer(20.0, 3.0, 5)], seconds=2.0)
    row = row_of(Level(95, 3), taken)
    assert (row["ttft_ms"]["median"], row["tpot_ms"]["median"]) == (20, 3)
    assert (row["tokens_per_s"], row["output_tokens_per_s"]) == (150, 7.5)


def test_the_table_has_a_line_per_level_and_names_the_best():
    def row(shape, concurrency, ttft, tpot, rate):
        times = {"ttft_ms": {"median": ttft}, "tpot_ms": {"median": tpot}, "tokens_per_s": rate}
        return {"prompt": 64, "concurrency": concurrency, "shape": shape, **times}

    rows = [
        row("dp", 1, 100.0, 5.0, 900.4),
        row("tp", 1, 60.0, 6.0, 1000.0),
        row("dp", 4, 1.0, 1.0, 1.0),
        row("tp", 4, 2.0, 2.0, 2.0),
    ]
    assert table(rows) == [
        "| prompt | at once | TTFT, ms: DP | TTFT, ms: TP | TPOT, ms: DP | TPOT, ms: TP | tokens/s: DP | tokens/s: TP |",
        "|---|---|---|---|---|---|---|---|",
        "| 64 | 1 | 100 | **60.0** | **5.0** | 6.0 | 900 | **1000** |",
        "| 64 | 4 | **1.0** | 2.0 | **1.0** | 2.0 | 1.0 | **2.0** |",
    ]


def test_an_unknown_shape_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--shapes", "dp,ep"])
    assert stopped.value.code == 2 and "--shapes" in capsys.readouterr().err


def test_the_help_says_what_is_measured(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(word in said for word in ("seeded model", *map(str.upper, SHAPES), "TTFT", "TPOT", "tokens/s"))


@pytest.mark.cluster
@pytest.mark.sweep
def test_every_shape_answers_at_every_level():
    command = [sys.executable, "-m", "benchmarks.shapes", "--json", "--prompts", "20", "--concurrency", "1,3"]
    command += ["--requests", "1", "--new-tokens", "4"]
    document = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout)
    assert [(row["concurrency"], row["shape"]) for row in document["rows"]] == [(c, shape) for c in (1, 3) for shape in SHAPES]
    assert all(row["ttft_ms"]["median"] > 0 and row["tpot_ms"]["median"] > 0 for row in document["rows"])
