"""The command line against a scripted server: documents, exit statuses, what is imported."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path

import pytest

from cp_client.bench_command import BENCHMARKS
from cp_client.cli import COMMANDS, build_parser, main
from cp_client.plain import plain
from cp_wire import errors
from cp_wire.pb import common_pb2
from cp_wire.pb import coordinator_pb2 as pb
from tests.cp_client.fake_coordinator import DEADLINE_S, WHOLE, FakeCoordinator, accepted, running, tokens


@pytest.fixture
def fake():
    return FakeCoordinator(WHOLE)


@pytest.fixture
def target(fake):
    with running(fake) as address:
        yield address


def test_generate_streams_text(target, capsys):
    assert main(["generate", "--target", target, "hi"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("Hello\n", "")


def test_generate_prints_one_document(target, capsys):
    assert main(["generate", "--target", target, "--json", "hi"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    timing = document.pop("timing")
    assert timing["ttft_ms"] > 0 and timing["tpot_ms"] >= 0
    assert document == {
        "request_id": "r1",
        "text": "Hello",
        "token_ids": [5, 6, 7],
        "finish_reason": "stop",
        "seed": 7,
        "usage": {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 1, "recomputed_tokens": 0},
        "route": {"ranks": [0, 1], "cp": 2, "prefill_group": [0, 1], "decode_group": [0, 1], "reason": "static"},
        "completions": [{"text": "Hello", "token_ids": [5, 6, 7], "finish_reason": "stop"}],
    }
    assert captured.err == ""


def test_generate_prints_completions_and_logprobs(capsys):
    top = [common_pb2.TokenLogprob(token_id=4, logprob=-0.5)]
    position = common_pb2.PositionLogprobs(sampled=-2.0, top=top)
    prompt = pb.PromptLogprobs(positions=[common_pb2.PositionLogprobs(), position])
    ends = [pb.CompletionEnd(finish_reason="stop"), pb.CompletionEnd(finish_reason="length")]
    script = [
        accepted(),
        pb.GenerateResponse(prompt_logprobs=prompt),
        tokens("B", 2, index=1),
        tokens("A", 1, logprobs=[position]),
        pb.GenerateResponse(finished=pb.Finished(finish_reason="stop", completions=ends)),
    ]
    with running(FakeCoordinator(script)) as target:
        words = ["-n", "2", "--top-logprobs", "1", "--prompt-logprobs", "1"]
        assert main(["generate", "--target", target, "--json", *words, "hi"]) == 0
    document = json.loads(capsys.readouterr().out)
    shown = {"logprob": -2.0, "top": [{"token_id": 4, "logprob": -0.5}]}
    assert document["completions"] == [
        {"text": "A", "token_ids": [1], "finish_reason": "stop", "logprobs": [shown]},
        {"text": "B", "token_ids": [2], "finish_reason": "length"},
    ]
    assert document["prompt_logprobs"] == [None, shown]


@pytest.mark.parametrize("words", [["-n", "2"], ["--logprobs"], ["--top-logprobs", "3"], ["--prompt-logprobs", "0"]])
def test_what_text_cannot_show_needs_json(fake, target, words, capsys):
    assert main(["generate", "--target", target, *words, "hi"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"kvloom: {words[0]} is given without --json")
    assert fake.requests == []
    assert main(["generate", "--target", target, "--json", *words, "hi"]) == 0


def test_one_completion_needs_no_json(target):
    assert main(["generate", "--target", target, "-n", "1", "--top-logprobs", "0", "hi"]) == 0


@pytest.mark.parametrize("bias", ["5", "5=", "=1", "x=1", "5=y", "1.5=2"])
def test_a_bias_is_an_id_and_a_number(bias, capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--target", "127.0.0.1:1", "--logit-bias", bias, "hi"])
    assert f"{bias!r} is not a token id and a number such as 42=-1.5" in capsys.readouterr().err


def test_generate_sends_its_flags(fake, target):
    words = "--max-tokens 5 --min-tokens 2 --temperature 0 --top-p 0.5 --top-k 3 --seed 9 --stop a --stop b --ignore-eos"
    words += " --min-p 0.25 --repetition-penalty 1.5 --presence-penalty -1 --frequency-penalty 0.5 --logit-bias 7=-2.5"
    words += " --logit-bias 8=3 -n 2 --logprobs --top-logprobs 4 --prompt-logprobs 0 --json"
    assert main(["generate", "--target", target, *words.split(), "hi"]) == 0
    assert fake.requests == [
        pb.GenerateRequest(
            text="hi",
            max_tokens=5,
            min_tokens=2,
            temperature=0,
            top_p=0.5,
            top_k=3,
            seed=9,
            stop=["a", "b"],
            ignore_eos=True,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=-1,
            frequency_penalty=0.5,
            logit_bias={7: -2.5, 8: 3},
            n=2,
            logprobs=True,
            top_logprobs=4,
            prompt_logprobs=0,
        )
    ]


def test_the_sources_of_a_prompt(fake, target, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("from a file — ü", encoding="utf-8")
    for words in (["--token-ids", "1,2,3"], ["--file", str(file)], ["--file", str(file), "--chat"], ["--chat", "hi"]):
        assert main(["generate", "--target", target, *words]) == 0
    ids, text, chat_file, chat = fake.requests
    assert list(ids.tokens.ids) == [1, 2, 3]
    assert text.text == chat_file.chat.messages[0].content == "from a file — ü"
    assert chat.chat.messages[0] == pb.ChatMessage(role="user", content="hi")


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (errors.InvalidRequest("max_tokens", 0, "must be at least 1"), 2),
        (errors.Unknown("no model fox here"), 2),
        (errors.Exhausted("the queue is full"), 1),
        (errors.Unavailable("rank 1 was lost"), 1),
        (errors.Internal("oops"), 1),
    ],
    ids=lambda value: str(value)[:12],
)
def test_exit_status_of_a_refusal_and_of_a_failure(fake, target, capsys, failure, status):
    fake.script = [failure]
    assert main(["generate", "--target", target, "--json", "hi"]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"kvloom: {failure.message}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--token-ids", "1,x"], "1,x"),
        (["--token-ids", "1,-1"], "token_ids is -1"),
        (["--token-ids", "1", "--chat"], "--chat"),
        (["--token-ids", "1", "hi"], "not allowed with"),
        ([], "required"),
        (["--file", "/nonexistent/prompt"], "no such file"),
        (["--max-tokens", "many", "hi"], "many"),
        (["--max-tokens", str(2**63), "hi"], "max_tokens is 9223372036854775808"),
    ],
)
def test_l4_refused_on_the_command_line(fake, target, capsys, words, said):
    try:
        status = main(["generate", "--target", target, *words])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    assert said in capsys.readouterr().err
    assert fake.requests == []


def test_ctrl_c_cancels_the_request(fake, target):
    gate = threading.Event()
    fake.script = [accepted(), tokens("a", 1), gate]
    command = [sys.executable, "-m", "cp_client.cli", "generate", "--target", target, "hi"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.read(1) == "a"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=DEADLINE_S)
    assert (child.returncode, err) == (1, "kvloom: interrupted\n")
    assert fake.cancelled.wait(DEADLINE_S)
    gate.set()


def status_message():
    config = common_pb2.ClusterConfig(tp=1, pcp=2, dcp=2, dp=1, merge=common_pb2.MERGE_AG_RS, model_name="fox")
    rank = pb.RankStatus(
        rank=1,
        role="mixed",
        state="lost",
        instance="ab",
        pid=77,
        kv_blocks_total=2**40,
        kv_blocks_free=3,
        fenced_reason="frozen",
    )
    groups = [pb.GroupStatus(name="dcp:0", ranks=[0, 1], epoch=2)]
    return pb.GetStatusResponse(ranks=[rank], groups=groups, running=1, waiting=2, config=config, state="degraded")


def test_status_document(fake, target, capsys):
    fake.status = status_message()
    assert main(["status", "--target", target, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rank = document["ranks"][0]
    assert (rank["rank"], rank["role"], rank["state"], rank["instance"], rank["pid"]) == (1, "mixed", "lost", "ab", 77)
    assert (rank["kv_blocks_total"], rank["kv_blocks_free"], rank["last_progress_ms"]) == (2**40, 3, 0)
    assert document["groups"] == [{"name": "dcp:0", "ranks": [0, 1], "epoch": 2}]
    assert (document["running"], document["waiting"]) == (1, 2)
    assert (document["config"]["pcp"], document["config"]["merge"]) == (2, "ag_rs")


def test_status_table(fake, target, capsys):
    fake.status = status_message()
    fake.status.config.model_name = "fox [7b]"
    fake.status.ranks[0].fenced_reason = "frozen: [two] of 3 peers waited for it in vain"
    fake.status.ranks[0].address = "a-host-with-a-long-name.in.a.long.domain:50123"
    assert main(["status", "--target", target]) == 0
    out = capsys.readouterr().out
    assert "fox [7b] degraded: tp 1, pcp 2, dcp 2, dp 1; 1 running, 2 waiting" in out
    row = next(line for line in out.splitlines() if "frozen" in line)
    assert "lost (frozen: [two] of 3 peers waited for it in vain)" in row and "3 / 1099511627776" in row
    assert "a-host-with-a-long-name.in.a.long.domain:50123" in row


def test_status_says_the_shape_of_each_side(fake, target, capsys):
    fake.status = status_message()
    for role, pcp in (("prefill", 4), ("decode", 2)):
        fake.status.sides.add(role=role, config=common_pb2.ClusterConfig(tp=1, pcp=pcp, dcp=pcp, dp=1))
    assert main(["status", "--target", target]) == 0
    assert "degraded: prefill tp 1, pcp 4, dcp 4, dp 1; decode tp 1, pcp 2, dcp 2, dp 1; 1 running" in capsys.readouterr().out


def test_status_says_how_steps_were_computed_and_what_a_link_costs(fake, target, capsys):
    fake.status = status_message()
    owner, split = common_pb2.DECODE_MODE_OWNER, common_pb2.DECODE_MODE_SPLIT
    fake.status.step_counts.add(decode_mode=owner, gather=common_pb2.GATHER_KV, steps=3)
    fake.status.step_counts.add(decode_mode=split, gather=common_pb2.GATHER_NONE, steps=20)
    fake.status.links.add(
        group="dcp:0", measured_latency_us=48.8, measured_bytes_per_s=1.6e9, latency_us=57.3, bytes_per_s=1.5e9
    )
    assert main(["status", "--target", target]) == 0
    out = capsys.readouterr().out
    assert "steps: owner gathering kv 3, split 20" in out
    assert "link dcp:0: 57 µs, 1.50 GB/s (measured at the start: 49 µs, 1.60 GB/s)" in out
    assert main(["status", "--target", target, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["step_counts"][0] == {"decode_mode": "owner", "gather": "kv", "steps": 3}
    assert document["links"][0]["measured_latency_us"] == 48.8


def test_status_says_what_moved_between_the_sides(fake, target, capsys):
    fake.status = status_message()
    transfers = fake.status.transfers
    transfers.requests, transfers.ranges, transfers.messages, transfers.payload_bytes, transfers.seconds = (
        3,
        7,
        12,
        4_200_000,
        0.31,
    )
    assert main(["status", "--target", target]) == 0
    assert "KV moved for 3 requests: 4.2 MB in 12 messages, 0.3 s\n" in capsys.readouterr().out
    transfers.recomputed.add(cause="UNAVAILABLE", requests=2)
    transfers.failed.add(cause="CORRUPTED", requests=1)
    assert main(["status", "--target", target]) == 0
    assert "0.3 s; recomputed after UNAVAILABLE 2; failed after CORRUPTED 1" in capsys.readouterr().out
    assert main(["status", "--target", target, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["transfers"]["recomputed"] == [{"cause": "UNAVAILABLE", "requests": 2}]


@pytest.mark.parametrize("words", [["status", "--json"], ["generate", "hi"]], ids=" ".join)
def test_a_command_that_nobody_answers(words, capsys):
    assert main([*words, "--target", "127.0.0.1:1"]) == 1
    said = "kvloom: no kvloom coordinator answers at 127.0.0.1:1: is it running? `kvloom up` starts one\n"
    assert capsys.readouterr() == ("", said)


def test_an_unset_enum_is_said_so():
    assert plain(common_pb2.ClusterConfig())["merge"] == "unspecified"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        build_parser(command).parse_args([command, "--help"])
    assert stopped.value.code == 0
    assert f"kvloom {command}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["fly"], ["--fly"]])
def test_an_unknown_command_is_refused(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("kvloom: ") and err.endswith(" (see kvloom --help)\n") and err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "hi"],
        ["generate", "--target", "127.0.0.1:1", "--nonsense", "hi"],
        ["status", "--target", "127.0.0.1:1", "--json=1"],
        ["up", "--block-size", "0"],
        ["explain", "slots", "--positions", "\n"],
        ["check", "--tp"],
    ],
    ids=" ".join,
)
def test_a_wrong_word_is_refused_in_one_sentence(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    captured = capsys.readouterr()
    assert (stopped.value.code, captured.out) == (2, "")
    assert captured.err.startswith("kvloom: ") and captured.err.count("\n") == 1
    assert captured.err.endswith("--help)\n")


def actions_of(parser):
    for action in parser._actions:
        yield from (each for sub in action.choices.values() for each in actions_of(sub)) if is_menu(action) else (action,)


def is_menu(action):
    return isinstance(action, argparse._SubParsersAction)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_states_the_defaults(command):
    parsers = next(filter(is_menu, build_parser(command)._actions)).choices
    for action in actions_of(parsers[command]):
        if action.default not in (None, False, argparse.SUPPRESS) or (command == "up" and action.dest in ("tp", "http_port")):
            assert "default" in (action.help or ""), action.option_strings


@pytest.mark.parametrize("text", ["0", "-5", "nan", "inf", "soon", "1e9", ""])
@pytest.mark.parametrize("command", ["generate", "status"])
def test_a_timeout_is_a_time(command, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--target", "127.0.0.1:1", f"--timeout={text}", *(["hi"] if command == "generate" else [])])
    assert stopped.value.code == 2
    said = f"argument --timeout: {text!r} is not a number of seconds above 0 and at most 1000000"
    assert said in capsys.readouterr().err


def test_a_timeout_that_passes_says_how_long_it_was(fake, target, capsys):
    gate = threading.Event()
    fake.script = [accepted(), tokens("a", 1), gate]
    assert main(["generate", "--target", target, "--timeout", "0.25", "hi"]) == 1
    gate.set()
    assert capsys.readouterr() == ("a\n", f"kvloom: no whole answer from {target} within 0.25 s (--timeout)\n")


@pytest.mark.parametrize("words", [["generate", "hi"], ["generate", "--json", "hi"]], ids=" ".join)
def test_a_deadline_of_the_servers_own_is_told_in_its_words(fake, target, capsys, words):
    fake.script = [errors.DeadlineExceeded("the prompt was not tokenised within 120 s")]
    assert main([*words, "--target", target]) == 1
    assert capsys.readouterr() == ("", "kvloom: the prompt was not tokenised within 120 s\n")


@pytest.mark.parametrize("text", ["127.0.0.1:50051", "localhost:1", "[::1]:65535", "node-3.example:80"])
def test_a_target_is_host_and_port(text):
    assert build_parser("status").parse_args(["status", "--target", text]).target == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("localhost", "is not HOST:PORT such as"),
        (":50051", "is not HOST:PORT such as"),
        ("::1:50051", "is not HOST:PORT such as"),
        ("dns:///x:1", "is not HOST:PORT such as"),
        ("a b:1", "is not HOST:PORT such as"),
        ("h:0", "has port '0', it must be from 1 to 65535"),
        ("h:65536", "has port '65536', it must be from 1 to 65535"),
        ("h:", "has port '', it must be from 1 to 65535"),
        ("h:²", "has port '²', it must be from 1 to 65535"),
        ("unix:/tmp/s", "has port '/tmp/s', it must be"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "status"])
def test_anything_else_is_no_target(command, text, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--target", text, *(["hi"] if command == "generate" else [])])
    assert stopped.value.code == 2
    assert f"kvloom: argument --target: {text!r} {said}" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["much", ""])
def test_a_piped_prompt_is_called_empty_only_if_it_is(fake, target, capsys, tmp_path, content):
    """A pipe has no size, and what was read from it is there no second time."""
    fake.script = [errors.InvalidRequest("prompt", "70000 tokens", "at most 4095 tokens")]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(content,), daemon=True)
    writer.start()
    assert main(["generate", "--target", target, "--file", str(pipe)]) == 2
    writer.join(DEADLINE_S)
    said = "prompt is 70000 tokens" if content else f"--file {pipe} is empty"
    assert capsys.readouterr().err == f"kvloom: {said}: at most 4095 tokens\n"


@pytest.mark.parametrize("field", ["prompt", "text"])
def test_an_empty_prompt_is_named_as_it_was_given(fake, target, capsys, tmp_path, field):
    fake.script = [errors.InvalidRequest(field, "empty", "it must be at least 1 token")]
    file = tmp_path / "nothing.txt"
    file.touch()
    for words, name in ((["--", ""], "PROMPT"), (["--file", str(file)], f"--file {file}")):
        assert main(["generate", "--target", target, *words]) == 2
        assert capsys.readouterr().err == f"kvloom: {name} is empty: it must be at least 1 token\n"
    assert main(["generate", "--target", target, "much"]) == 2
    assert capsys.readouterr().err == f"kvloom: {field} is empty: it must be at least 1 token\n"


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        ("explain", {"torch", "grpc", "google.protobuf", "rich", "model_files"}),
        ("check", {"torch", "grpc", "google.protobuf", "model_files"}),
        ("generate", {"torch", "model_files", "cp_layout", "numpy", "rich"}),
        ("status", {"torch", "model_files", "cp_layout", "numpy", "rich"}),
        ("up", {"torch", "transformers"}),
    ],
)
def test_a_command_imports_what_it_needs(command, absent):
    code = f"import sys; from cp_client.cli import build_parser; build_parser({command!r}); print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert not absent & set(done.stdout.split())


@pytest.mark.parametrize(("flag", "status"), [("--help", 0), ("--nonsense", 2)])
def test_bench_hands_its_words_on(flag, status):
    command = [sys.executable, "-m", "cp_client.cli", "bench", "layout", flag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == status
    assert "--seeds" in done.stdout or status


def test_a_benchmark_that_is_told_to_go_takes_all_it_has_started_along():
    """Everything it has started holds its standard error."""
    command = [sys.executable, "-m", "cp_client.cli", "bench", "transfer", "--mib", "1", "--runs", "100000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until = time.monotonic() + DEADLINE_S
        while len(children.read_text().split()) < 4:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        process.terminate()
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("layout --block-size 0", "--block-size: 0 is outside [1, "),
        ("layout --seeds -1", "--seeds: -1 is outside [1, "),
        ("decode --contexts 512,0", "--contexts: 0 is outside [1, "),
        ("decode --runs 0", "--runs: 0 is outside [1, "),
        ("decode --new-tokens 2", "--new-tokens: 2 is outside [3, "),
        ("collectives --members 1", "--members: 1 is outside [2, "),
        ("collectives --sizes 8,x", "--sizes: 'x' is not a whole number"),
    ],
)
def test_a_benchmark_refuses_what_it_cannot_measure(words, said, capsys):
    name, *flags = words.split()
    with pytest.raises(SystemExit) as stopped:
        import_module(f"benchmarks.{name}").main(flags)
    err = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said in err and err.count("\n") == 1


def test_every_benchmark_has_its_name_on_the_command_line():
    sources = (Path(__file__).parents[2] / "benchmarks").glob("*.py")
    modules = {path.stem for path in sources if "\ndef main(" in path.read_text()}
    assert {name.replace("-", "_") for name in BENCHMARKS} == modules
