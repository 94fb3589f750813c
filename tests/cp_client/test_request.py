"""Keyword arguments to the message: what arrives, what cannot be put on the wire."""

import numpy as np
import pytest

from cp_client.request import generate_request
from cp_wire.errors import InvalidRequest
from cp_wire.pb import coordinator_pb2 as pb


def test_an_absent_option_stays_absent():
    assert generate_request("hi", max_tokens=None, stop=None) == pb.GenerateRequest(text="hi")


def test_every_option_arrives():
    got = generate_request(
        "hi",
        max_tokens=5,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        seed=0,
        stop="end",
        stop_token_ids=[1, 2],
        ignore_eos=True,
        min_tokens=1,
        top_logprobs=4,
        logprobs=True,
        prompt_logprobs=0,
        min_p=0.0,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={3: -1.5, 0: 2},
        n=3,
        model="m",
        request_id="r",
        cache_salt="s",
    )
    assert got == pb.GenerateRequest(
        text="hi",
        max_tokens=5,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        seed=0,
        stop=["end"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
        min_tokens=1,
        top_logprobs=4,
        logprobs=True,
        prompt_logprobs=0,
        min_p=0.0,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={3: -1.5, 0: 2},
        n=3,
        model="m",
        request_id="r",
        cache_salt="s",
    )
    assert got.HasField("temperature") and got.HasField("seed") and got.HasField("prompt_logprobs")


def test_the_three_kinds_of_prompt():
    assert generate_request(None, token_ids=[]).WhichOneof("prompt") == "tokens"
    assert list(generate_request(None, token_ids=[3, 4]).tokens.ids) == [3, 4]
    chat = generate_request(None, messages=[{"role": "user", "content": "hi"}]).chat
    assert chat == pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
    assert generate_request("").WhichOneof("prompt") == "text"


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (None, {}, "prompt"),
        ("a", {"token_ids": [1]}, "prompt"),
        (7, {}, "prompt"),
        ("bad \ud800", {}, "prompt"),
        (None, {"token_ids": [1, -1]}, "token_ids"),
        (None, {"token_ids": [1, 2**32]}, "token_ids"),
        (None, {"token_ids": [1, "2"]}, "token_ids"),
        (None, {"token_ids": 5}, "token_ids"),
        (None, {"messages": 5}, "messages"),
        (None, {"messages": [{"role": "user"}]}, "messages"),
        (None, {"messages": ["hi"]}, "messages"),
        ("a", {"max_tokens": 2**63}, "max_tokens"),
        ("a", {"max_tokens": "5"}, "max_tokens"),
        ("a", {"seed": -1}, "seed"),
        ("a", {"ignore_eos": "yes"}, "ignore_eos"),
        ("a", {"ignore_eos": 1}, "ignore_eos"),
        ("a", {"logprobs": "no"}, "logprobs"),
        ("a", {"stop": [1]}, "stop"),
        ("a", {"stop": 5}, "stop"),
        ("a", {"stop_token_ids": 5}, "stop_token_ids"),
        ("a", {"logit_bias": [5]}, "logit_bias"),
        ("a", {"stop_token_ids": [2**63]}, "stop_token_ids"),
        ("a", {"n": 1.5}, "n"),
        ("a", {"repetition_penalty": "2"}, "repetition_penalty"),
        ("a", {"logit_bias": {2**63: 1.0}}, "logit_bias"),
        ("a", {"logit_bias": {1: "x"}}, "logit_bias"),
        ("x" * (32 << 20), {}, "request"),
    ],
)
def test_l4_refused_before_it_is_sent(prompt, options, field):
    with pytest.raises(InvalidRequest) as caught:
        generate_request(prompt, **options)
    assert caught.value.field == field
    assert not caught.value.retryable
    assert len(caught.value.message) < 200
    assert caught.value.value and caught.value.limit.startswith(("must ", "each must ", "give exactly one"))


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("a", {"seed": -1}, "seed is -1: must be a whole number from 0 to 2^64 - 1"),
        ("a", {"max_tokens": "5"}, "max_tokens is 5: must be a whole number from -2^63 to 2^63 - 1"),
        ("a", {"temperature": "hot"}, "temperature is hot: must be a number"),
        ("a", {"ignore_eos": "yes"}, "ignore_eos is yes: must be True or False"),
        (None, {"token_ids": 5}, "token_ids is 5: must be a sequence of whole numbers"),
        (
            None,
            {"token_ids": [3, 2**40]},
            "token_ids is 1099511627776: must be whole numbers from 0 to vocabulary size - 1, which is at most 4294967295",
        ),
        ("bad \ud800", {}, "prompt is bad \ud800: must be text of valid Unicode"),
    ],
)
def test_l4_a_refusal_names_field_value_and_limit(prompt, options, said):
    with pytest.raises(InvalidRequest) as caught:
        generate_request(prompt, **options)
    assert caught.value.message == said


def test_arrays_are_sequences():
    with pytest.raises(InvalidRequest, match=r"token_ids is .*1099511627776"):
        generate_request(None, token_ids=np.array([3, 2**40]))
    got = generate_request(None, token_ids=np.array([3, 4]), stop_token_ids=np.array([5, 6]))
    assert (list(got.tokens.ids), list(got.stop_token_ids)) == ([3, 4], [5, 6])


def test_an_unknown_keyword_is_a_mistake_of_the_caller():
    with pytest.raises(TypeError, match=r"^unknown keyword max_token, temprature: the keywords are token_ids, .*max_tokens"):
        generate_request("hi", temprature=0, max_token=5)


@pytest.mark.parametrize(
    "options", [{"temperature": float("nan")}, {"top_p": 7.0}, {"max_tokens": -1}, {"stop": [""]}, {"stop": ""}]
)
def test_the_server_judges_what_the_wire_can_carry(options):
    assert generate_request("a", **options) != generate_request("a")
