"""The coordinator as a process: what it imports, prints and exits with."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.__main__ import build_parser, main
from cp_client import Client, errors

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30


def start(*arguments: str, module: str = "coordinator") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def refusal(*arguments: str) -> tuple[int, str, str]:
    process = start(*arguments)
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, out, err.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    from tests.tiny_models import build_tiny_llama

    return str(build_tiny_llama(tmp_path_factory.mktemp("model")))


def test_it_never_imports_torch():
    strangers = {"torch", "transformers", "cp_client", "rank_server"}
    code = f"import sys, coordinator.__main__; sys.exit(bool({strangers} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=DEADLINE_S).returncode == 0


def test_flags_of_the_process():
    args = build_parser().parse_args(["--model", "m", "--start-timeout", "3", "--drain-timeout", "0", "-pcp", "2", "-dcp", "2"])
    assert (args.start_timeout, args.drain_timeout, args.pcp, args.dcp, args.port) == (3, 0, 2, 2, 0)
    assert args.metrics_port == 0
    assert build_parser().parse_args(["--model", "m", "--metrics-port", "9464"]).metrics_port == 9464


def test_a_wrong_flag_is_refused_in_one_sentence(capsys):
    with pytest.raises(SystemExit) as stopped:
        build_parser().parse_args(["--model", "m", "--port", "x"])
    said = "fatal: argument --port: 'x' is not a whole number (see python -m coordinator --help)\n"
    assert (stopped.value.code, capsys.readouterr().err) == (2, said)


def test_one_port_for_calls_and_metrics_is_refused(model, capsys):
    assert main(["--model", model, "--port", "9464", "--metrics-port", "9464"]) == 2
    said = "fatal: --port and --metrics-port are both 9464: calls and metrics need a port each\n"
    assert capsys.readouterr() == ("", said)


@pytest.mark.cluster
def test_wrong_model_path_is_refused():
    status, out, last = refusal("--model", "/nowhere/at/all")
    assert (status, out) == (2, "")
    assert last.startswith("fatal: ")


@pytest.mark.cluster
def test_broken_law_is_refused_before_it_listens(model):
    status, out, last = refusal("--model", model, "-tp", "3")
    assert (status, out) == (2, "")
    assert last.startswith("fatal: ") and "tp 3" in last


@pytest.mark.cluster
def test_port_in_use_is_one_clear_line(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, out, last = refusal("--model", model, "--port", str(port))
    assert status == 1 and out == ""
    assert last.startswith("fatal: ") and str(port) in last


@pytest.mark.cluster
def test_start_deadline_ends_the_process(model):
    status, out, last = refusal("--model", model, "--start-timeout", "1")
    assert status == 1
    assert out.startswith("listening grpc=127.0.0.1:")
    assert last == "fatal: not ready after 1 s: rank 0 is absent"


@pytest.mark.cluster
@pytest.mark.parametrize("how", ["SIGTERM", "stdin"])
def test_m2_it_ends_by_signal_and_with_its_launcher(model, how):
    process = start("--model", model, "--exit-with-stdin")
    try:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline().startswith("listening grpc=127.0.0.1:")
        if how == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        else:
            process.stdin.close()
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def serving(model: str, *flags: str) -> Iterator[tuple[Client, subprocess.Popen[str]]]:
    """A coordinator and its one rank; afterwards both must have ended with status 0."""
    with contextlib.ExitStack() as stack:
        coordinator = start("--model", model, *flags)
        stack.callback(end, coordinator)
        assert coordinator.stdout is not None
        address = coordinator.stdout.readline().split("=")[1].strip()
        rank = start("--model", model, "--rank", "0", "--coordinator", address, module="rank_server")
        stack.callback(end, rank)
        assert coordinator.stdout.readline() == f"ready grpc={address}\n"
        with Client(address) as client:
            yield client, coordinator
        assert coordinator.wait(DEADLINE_S) == 0
        assert rank.wait(DEADLINE_S) == 0


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=DEADLINE_S)


def one_running_one_queued(client: Client, pool: ThreadPoolExecutor) -> list[Future[int]]:
    """Numbers of tokens of two requests where only one may run: the first has streamed a token and the second waits."""
    running = threading.Event()

    def run() -> int:
        count = 0
        with client.generate(token_ids=[5, 6, 7], max_tokens=400, ignore_eos=True, timeout=2 * DEADLINE_S) as stream:
            for event in stream:
                count += len(event.token_ids)
                running.set()
        return count

    first = pool.submit(run)
    assert running.wait(DEADLINE_S)
    second = pool.submit(run)
    deadline = time.monotonic() + DEADLINE_S
    while client.status().waiting == 0:
        assert time.monotonic() < deadline
    return [first, second]


@pytest.mark.cluster
@pytest.mark.parametrize("in_time", [True, False])
def test_m5_sigterm_lets_accepted_requests_finish_within_the_drain_time(model, in_time):
    drain_s = DEADLINE_S if in_time else 0
    with (
        serving(model, "--max-num-seqs", "1", "--drain-timeout", str(drain_s)) as (client, coordinator),
        ThreadPoolExecutor(2) as pool,
    ):
        calls = one_running_one_queued(client, pool)
        coordinator.send_signal(signal.SIGTERM)
        if in_time:
            assert [call.result(DEADLINE_S) for call in calls] == [400, 400]
        else:
            for call in calls:
                with pytest.raises(errors.Unavailable, match="shutting down"):
                    call.result(DEADLINE_S)
