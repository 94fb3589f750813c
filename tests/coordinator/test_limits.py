import math

import pytest

from coordinator.limits import Limits, RequestRefused, completions, shortened
from coordinator.plan import Sampling
from cp_layout.interleave import Layout

LIMITS = Limits(max_model_len=100, vocab_size=50, layout=Layout(1, 4, 4), blocks_per_member=1000, eos_token_ids=(2, 3))
PROMPT = [1] * 10


def accept(prompt=PROMPT, limits=LIMITS, **fields) -> Sampling:
    return limits.validate(prompt, **{"seed": 1, **fields})


def refuse(prompt=PROMPT, limits=LIMITS, **fields) -> RequestRefused:
    with pytest.raises(RequestRefused) as refused:
        accept(prompt, limits, **fields)
    return refused.value


@pytest.mark.parametrize(
    ("field", "accepted", "refused"),
    [
        ("max_tokens", [1, 89, 90], [0, -1, 91, 2**31 - 1, 2**31]),
        ("temperature", [0.0, 1e-30, 1.0, 100.0], [-1e-9, 100.1, math.inf, -math.inf, math.nan]),
        ("top_p", [1e-9, 0.5, 1.0], [0.0, -0.1, 1.0000001, math.inf, math.nan]),
        ("top_k", [0, 1, 2**31 - 1], [-1, 2**31]),
        ("seed", [0, 1, 2**64 - 1], [-1, 2**64]),
        ("min_tokens", [0, 1, 90], [-1, 91]),
        ("top_logprobs", [0, 19, 20], [-1, 21]),
        ("prompt_logprobs", [None, 0, 20], [-1, 21]),
        ("min_p", [0.0, 1e-30, 1.0], [-1e-9, 1.0001, math.nan]),
        ("repetition_penalty", [0.1, 1.0, 10.0], [0.0, 0.0999, 10.1, -1.0, math.inf, math.nan]),
        ("presence_penalty", [-2.0, 0.0, 2.0], [-2.01, 2.01, math.nan]),
        ("frequency_penalty", [-2.0, 0.0, 2.0], [-2.01, 2.01, -math.inf, math.nan]),
    ],
)
def test_l4_numbers_are_bounded_on_both_sides(field, accepted, refused):
    for value in accepted:
        assert getattr(accept(**{field: value}), field) == value
    for value in refused:
        error = refuse(**{field: value})
        assert error.field == field
        assert str(value) in str(error)


def test_l4_the_prompt_has_a_token_and_leaves_room_for_one():
    assert "at least 1" in refuse([]).limit
    assert accept([1]).max_tokens == 99
    assert accept([1] * 99).max_tokens == 1
    error = refuse([1] * 100)
    assert (error.field, error.value) == ("prompt", "100 tokens")
    assert "at most 99" in str(error)


def test_l4_token_ids_are_inside_the_vocabulary():
    assert accept([0, 49])
    assert refuse([0, 50]).value == "50"
    assert refuse([0, -1]).value == "-1"
    assert "from 0 to 49" in str(refuse([0, 50]))


def test_l4_prompt_and_max_tokens_share_max_model_len():
    assert accept([1] * 60, max_tokens=40).max_tokens == 40
    error = refuse([1] * 60, max_tokens=41)
    assert error.field == "max_tokens"
    assert "at most 40 (max_model_len 100 − 60 prompt tokens)" in str(error)


def test_min_tokens_is_at_most_max_tokens():
    assert accept(max_tokens=5, min_tokens=5).min_tokens == 5
    assert refuse(max_tokens=5, min_tokens=6).limit == "from 0 to 5"


def test_l4_stop_strings():
    assert accept(stop=["x"] * 16)
    assert refuse(stop=["x"] * 17).value == "17 strings"
    assert accept(stop=["x" * 255])
    assert accept(stop=["x" * 256])
    assert refuse(stop=["x" * 257]).field == "stop"
    assert "empty" in str(refuse(stop=["x", ""]))
    assert refuse(stop=["x"] * 10_000_000).value == "10000000 strings"


def test_stop_token_ids_are_few_and_inside_the_vocabulary():
    assert accept(stop_token_ids=[0, 49]).stop_token_ids == (0, 49, 2, 3)
    assert refuse(stop_token_ids=[50]).field == "stop_token_ids"
    assert refuse(stop_token_ids=[-1]).field == "stop_token_ids"
    assert accept(stop_token_ids=[1] * 64)
    assert refuse(stop_token_ids=[1] * 65).value == "65 ids"


def test_logit_biases_are_few_bounded_and_inside_the_vocabulary():
    assert accept(logit_bias={49: -100.0, 0: 100.0}).logit_bias == ((0, 100.0), (49, -100.0))
    for token in (-1, 50):
        assert refuse(logit_bias={token: 0.0}).field == "logit_bias token id"
    for bias in (100.1, -100.1, math.nan, math.inf):
        assert refuse(logit_bias={1: bias}).field == "logit_bias"
    many = Limits(max_model_len=100, vocab_size=400, layout=Layout(1, 4, 4), blocks_per_member=1000)
    assert len(accept(limits=many, logit_bias=dict.fromkeys(range(300), 1.0)).logit_bias) == 300
    assert refuse(limits=many, logit_bias=dict.fromkeys(range(301), 1.0)).value == "301 entries"


def test_completions_are_1_to_16():
    assert [completions(n) for n in (None, 1, 16)] == [1, 1, 16]
    for n in (0, -1, 17, 2**62):
        with pytest.raises(RequestRefused, match=f"n is {n}, it must be from 1 to 16"):
            completions(n)


def test_the_scores_of_a_prompt_are_bounded():
    """2²² values: a prompt of 2²² / 21 tokens may have 20 alternatives, a longer one fewer."""
    long = [1] * (2**22 // 21 + 1)
    limits = Limits(max_model_len=2**20, vocab_size=50, layout=Layout(1, 4, 4), blocks_per_member=2**18)
    assert accept(long[1:], limits, prompt_logprobs=20)
    assert accept(long, limits, prompt_logprobs=19)
    assert refuse(long, limits, prompt_logprobs=20).field == "prompt_logprobs"


def test_end_of_sequence_ids_end_a_request_unless_ignored():
    assert accept().stop_token_ids == (2, 3)
    assert accept(stop_token_ids=[7, 3]).stop_token_ids == (7, 3, 2)
    assert accept(stop_token_ids=[7, 3], ignore_eos=True).stop_token_ids == (7, 3)


def test_defaults():
    assert accept() == Sampling(seed=1, stop_token_ids=(2, 3), max_tokens=90)
    roomy = Limits(max_model_len=10_000, vocab_size=50, layout=Layout(1, 4, 4), blocks_per_member=1000)
    assert accept(limits=roomy) == Sampling(seed=1, max_tokens=256)


@pytest.mark.parametrize("cp", [1, 4])
def test_g1_a_request_larger_than_the_pool_is_refused_by_name(cp):
    """Five blocks per member hold 20·cp tokens; the KV of the last output token is never written."""
    limits = Limits(max_model_len=1000, vocab_size=50, layout=Layout(cp, 4, 4), blocks_per_member=5)
    assert accept([1] * 10, limits, max_tokens=20 * cp - 9).max_tokens == 20 * cp - 9
    error = refuse([1] * 10, limits, max_tokens=20 * cp - 8)
    assert error.field == "max_tokens"
    assert "10 prompt tokens it needs 6 KV blocks on a rank, the pool has 5" in str(error)
    assert accept([1] * 20 * cp, limits, max_tokens=1).max_tokens == 1
    assert "the size of the KV pool" in str(refuse([1] * (20 * cp + 1), limits, max_tokens=1))


def test_g1_the_default_of_max_tokens_fits_the_pool():
    limits = Limits(max_model_len=1000, vocab_size=50, layout=Layout(2, 4, 4), blocks_per_member=5)
    assert accept([1] * 10, limits).max_tokens == 31
    assert accept([1] * 40, limits).max_tokens == 1


def test_l4_a_message_repeats_at_most_64_characters_of_a_value():
    assert shortened("y" * 64) == "y" * 64
    assert shortened("y" * 65) == "y" * 63 + "…"
    assert len(shortened(10**200)) == 64
    value = refuse(stop=["\0" * 1_000_000]).value
    assert len(value) == 64
    assert value.isprintable()
