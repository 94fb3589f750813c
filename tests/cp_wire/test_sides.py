"""Flags of a cluster with two sides: what each side gets, and what is refused."""

import argparse

import pytest

from cp_layout.errors import LayoutError
from cp_wire import flags
from cp_wire.pb import common_pb2
from cp_wire.side_flags import sides_of
from cp_wire.sides import in_order, sides_from


def parse(text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    flags.add_cluster_flags(parser)
    return parser.parse_args(text.split())


def sides(text: str):
    return sides_from(parse(text), lambda asked: asked)


def test_without_numbers_of_ranks_there_is_one_side():
    args = parse("-tp 2 -dp 2 --block-size 8")
    (only,) = sides_from(args, lambda asked: asked)
    assert (only.role, only.first_rank, only.config) == ("mixed", 0, flags.cluster_config_from(args))
    assert sides_of(args) == {"mixed": args}


def test_every_flag_exists_for_each_side_and_holds_for_both_without_a_prefix():
    prefill, decode = sides(
        "--prefill-ranks 4 --decode-ranks 6 -dcp 1 --block-size 8 --max-num-batched-tokens 50 --max-num-seqs 3 "
        "--prefill.tp 2 --prefill.pcp 2 --prefill.dcp 4 --prefill.cp-kv-cache-interleave-size 1 "
        "--prefill.kv-cache-tokens-per-rank 640 --decode.tp 3 --decode.dp 2 --decode.block-size 4 "
        "--decode.max-num-batched-tokens 70"
    )
    shared = {"merge": common_pb2.MERGE_A2A, "dtype": "auto", "kv_cache_dtype": "auto", "collectives": "auto"} | {
        "pcp_gather": "auto", "mla_gather": "auto", "device": "auto", "max_num_seqs": 3,
    }  # fmt: skip
    assert prefill.config == common_pb2.ClusterConfig(
        tp=2, pcp=2, dcp=4, dp=1, interleave=1, block_size=8, kv_cache_tokens_per_rank=640, max_num_batched_tokens=50, **shared
    )
    assert decode.config == common_pb2.ClusterConfig(
        tp=3, pcp=1, dcp=1, dp=2, block_size=4, max_num_batched_tokens=70, **shared
    )
    assert [(side.role, side.first_rank, side.grid.world_size) for side in (prefill, decode)] == [
        ("prefill", 0, 4),
        ("decode", 4, 6),
    ]
    assert prefill.layout.num_shards == 4


REFUSED = {
    "--prefill-ranks 3 --decode-ranks 1 --prefill.tp 2": r"the prefill side has 3 ranks \(--prefill-ranks\), .* = 2 \(.*tp 2\)",
    "--prefill-ranks 2 --decode-ranks 2 -tp 2 --decode.dp 2": r"the decode side has 2 ranks .* = 4 \(dp 2, pcp 1, tp 2\)",
    "--prefill-ranks 2": "--prefill-ranks 2 without --decode-ranks",
    "--decode-ranks 2": "--decode-ranks 2 without --prefill-ranks",
    "--prefill.tp 2": "--prefill.tp 2 is for a side of its own",
    "--decode.block-size 8 -tp 2": "--decode.block-size 8 is for a side of its own",
    "--kv-load-failure-policy fail": "--kv-load-failure-policy fail without --prefill-ranks and --decode-ranks",
    "--prefill-ranks 2 --decode-ranks 1 --prefill.tp 2 --prefill.dcp 4": "prefill side: tp 2 must be a multiple of d = 4",
}


@pytest.mark.parametrize("text", REFUSED)
def test_j2_what_does_not_fit_is_refused_with_the_numbers(text):
    with pytest.raises(LayoutError, match=REFUSED[text]):
        sides_from(parse(text), lambda asked: in_order({"mixed": asked})[0].grid and asked)


@pytest.mark.parametrize("words", ["--prefill.tp 0", "--decode-ranks 0", "--prefill.seed 1", "--kv-load-failure-policy retry"])
def test_j2_refused_while_parsing(words, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(words)
    assert caught.value.code == 2
    assert words.split()[0] in capsys.readouterr().err


def test_the_policy_that_holds_anyway_may_be_named():
    assert [side.role for side in sides("--kv-load-failure-policy recompute")] == ["mixed"]


def test_j5_flags_of_sides_survive_being_handed_on():
    args = parse("--prefill-ranks 2 --decode-ranks 1 --prefill.pcp 2 --decode.block-size 8 --kv-load-failure-policy fail")
    assert parse(" ".join(flags.cluster_argv(args))) == args
