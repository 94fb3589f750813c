"""`kvloom generate` against a scripted server: what it sends, what it prints, how it ends."""

import json
import signal
import subprocess
import sys
import threading

import pytest

from cp_client.cli import main
from cp_wire import errors
from cp_wire.pb import common_pb2
from cp_wire.pb import coordinator_pb2 as pb
from tests.cp_client.fake_coordinator import DEADLINE_S, FakeCoordinator, accepted, running, tokens


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
