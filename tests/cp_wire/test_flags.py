"""Flags: names, bounds, defaults."""

import argparse
import os

import pytest

from cp_wire import flags
from cp_wire.pb import common_pb2


def parse(*words):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    flags.add_cluster_flags(parser)
    return parser.parse_args(words)


def config(*words):
    return flags.cluster_config_from(parse(*words))


def test_defaults():
    assert config() == common_pb2.ClusterConfig(
        tp=1,
        pcp=1,
        dcp=1,
        dp=1,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        merge=common_pb2.MERGE_A2A,
        dtype="auto",
        kv_cache_dtype="auto",
        collectives="auto",
        pcp_gather="auto",
        mla_gather="auto",
        device="auto",
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tp", ("-tp", "--tp", "--tensor-parallel-size")),
        ("pcp", ("-pcp", "--pcp", "--prefill-context-parallel-size")),
        ("dcp", ("-dcp", "--dcp", "--decode-context-parallel-size")),
        ("dp", ("-dp", "--dp", "--data-parallel-size")),
    ],
)
def test_each_size_has_a_short_and_a_long_name(name, words):
    assert [getattr(config(word, "3"), name) for word in words] == [3, 3, 3]


EVERYTHING = (
    "-tp 4 -dcp 2 --block-size 8 --cp-kv-cache-interleave-size 4 --max-model-len 100 --max-num-seqs 5 "
    "--max-num-batched-tokens 7 --dcp-comm-backend ag_rs --dtype float32 --kv-cache-dtype bfloat16 "
    "--collectives gloo --kv-cache-memory-bytes 1.5MiB --pcp-gather kv --mla-gather q"
)


def test_every_value_arrives():
    got = config(*EVERYTHING.split())
    assert got == common_pb2.ClusterConfig(
        tp=4,
        pcp=1,
        dcp=2,
        dp=1,
        interleave=4,
        block_size=8,
        max_model_len=100,
        max_num_seqs=5,
        max_num_batched_tokens=7,
        merge=common_pb2.MERGE_AG_RS,
        dtype="float32",
        kv_cache_dtype="bfloat16",
        collectives="gloo",
        device="auto",
        pcp_gather="kv",
        mla_gather="q",
        kv_cache_memory_bytes=3 << 19,
    )


@pytest.mark.parametrize(
    "words",
    [[], EVERYTHING.split(), ["--seed", "0", "--device", "cuda", "--threads-per-rank", "3", "--host", "::1", "-pcp", "2"]],
)
def test_j5_flags_survive_being_handed_on(words):
    args = parse(*words)
    assert parse(*flags.cluster_argv(args)) == args


def test_j3_an_interleave_that_is_not_asked_for_is_left_open():
    assert config("--block-size", "3").interleave == 0
    assert config("--block-size", "4", "--cp-kv-cache-interleave-size", "8").interleave == 8


def test_the_token_budget_follows_the_device():
    assert config("--device", "cuda").max_num_batched_tokens == 8192
    assert config("--device", "cuda", "--max-num-batched-tokens", "64").max_num_batched_tokens == 64


@pytest.mark.parametrize(
    "words",
    [
        ("-tp", "0"),
        ("-pcp", "-1"),
        ("-dcp", "x"),
        ("--block-size", "0"),
        ("--block-size", "4294967296"),
        ("--cp-kv-cache-interleave-size", "0"),
        ("--dtype", "int8"),
        ("--dcp-comm-backend", "p2p"),
        ("--pcp-gather", "both"),
        ("--mla-gather", "both"),
        ("--seed", "-1"),
        ("--kv-cache-memory-bytes", "1 lot"),
        ("--kv-cache-tokens-per-rank", "1", "--kv-cache-memory-bytes", "1"),
        ("--cp-mode", "dynamic"),
    ],
)
def test_j2_refused_while_parsing(words, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == 2
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("512MiB", 512 << 20), ("1.5GiB", 3 << 29), ("2GB", 2 * 10**9), ("141 gib", 141 << 30)]
)
def test_byte_counts(text, count):
    assert flags.byte_count(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "nan", "inf", "1e30", "3 blocks", "1.2.3"])
def test_no_byte_counts(text):
    with pytest.raises(argparse.ArgumentTypeError):
        flags.byte_count(text)


def test_threads_are_an_equal_share_and_at_least_one():
    cpus = len(os.sched_getaffinity(0))
    assert flags.threads_per_rank(0, 1) == cpus
    assert flags.threads_per_rank(0, 10 * cpus) == 1
    assert flags.threads_per_rank(3, 10 * cpus) == 3
