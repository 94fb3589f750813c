"""The sampler against plain-Python arithmetic and exact probabilities; every draw has a fixed seed."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from transformers import MinPLogitsWarper

from rank_server import sampler
from rank_server.penalties import TokenHistory
from rank_server.sampler import Draw, RowSampling, sample, uniform

GREEDY = RowSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, output_index=0)
WARM = replace(GREEDY, temperature=1.0)
INF, NAN = math.inf, math.nan


def draw(logits: list[float], wanted: RowSampling) -> Draw:
    (got,) = sample(torch.tensor([logits]), [wanted])
    return got


def survivors(logits: list[float], wanted: RowSampling) -> dict[int, float]:
    """Id → probability after temperature, min_p, top_k and top_p, by sorting the whole list."""
    peak = max(logits)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    likely = [i for i in order if math.exp((logits[i] - peak) / wanted.temperature) >= wanted.min_p]
    weight = {i: math.exp((logits[i] - peak) / wanted.temperature) for i in likely[: wanted.top_k or None]}
    total, kept, mass = sum(weight.values()), {}, 0.0
    for i, w in weight.items():
        kept[i] = w
        mass += w
        if wanted.top_p < 1 and mass >= wanted.top_p * total:
            break
    return {i: w / mass for i, w in kept.items()}


def expected_token(logits: list[float], wanted: RowSampling) -> int:
    """Inverse CDF over the survivors in order of id."""
    point, mass = uniform(wanted.seed, wanted.output_index), 0.0
    kept = survivors(logits, wanted)
    for i in sorted(kept):
        mass += kept[i]
        if mass > point:
            return i
    raise AssertionError("the point lies beyond the distribution")


def as_float32(values: list[float]) -> list[float]:
    return torch.tensor(values).tolist()


def test_b11_greedy_ties_go_to_the_lowest_id():
    for places in itertools.combinations(range(6), 2):
        assert draw([2.5 if i in places else -1.0 for i in range(6)], GREEDY).token_id == places[0]


def test_b11_a_tie_in_a_large_vocabulary():
    logits = torch.zeros(3, 50_000)
    for place in (49_999, 31_000, 777):
        logits[:, place] = 1.0
    assert [got.token_id for got in sample(logits, [GREEDY] * 3)] == [777] * 3


def test_greedy_tells_neighbouring_floats_apart():
    larger = float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))
    assert draw([1.0, larger, 1.0], GREEDY).token_id == 1


@pytest.mark.parametrize("noise", [1e-7, -1e-7])
def test_b11_noise_below_the_logits_does_not_move_a_seeded_draw(noise):
    logits = [3.0, 1.0, 3.0, 0.5]
    for index in range(20):
        wanted = replace(WARM, seed=5, output_index=index)
        assert draw(logits, wanted).token_id == draw([logits[0] + noise, *logits[1:]], wanted).token_id


def test_draws_equal_the_plain_definition():
    random_ = random.Random(3)
    for case in range(400):
        size = random_.choice([1, 2, 5, 17, 60])
        logits = as_float32([random_.choice([random_.gauss(0, 3), 1.0, 2.0]) for _ in range(size)])
        wanted = RowSampling(
            temperature=random_.choice([0.2, 0.7, 1.0, 1.8]),
            top_p=random_.choice([1.0, 0.95, 0.5, 0.1]),
            top_k=random_.choice([0, 1, 3, 20, 100]),
            min_p=random_.choice([0.0, 0.0, 0.02, 0.3, 0.9]),
            seed=case,
            output_index=case % 7,
        )
        assert draw(logits, wanted).token_id == expected_token(logits, wanted), wanted


@pytest.mark.parametrize(("spread", "top_p"), [(0.1, 0.9), (0.1, 0.02), (6.0, 0.9)])
def test_a_nucleus_of_any_size_in_a_large_vocabulary(spread, top_p):
    random_ = random.Random(9)
    logits = as_float32([random_.gauss(0, spread) for _ in range(5000)])
    sizes = len(survivors(logits, replace(WARM, top_p=top_p)))
    assert (sizes > 1024) == (spread < 1 and top_p > 0.5)
    for seed in range(20):
        wanted = replace(WARM, top_p=top_p, seed=seed)
        assert draw(logits, wanted).token_id == expected_token(logits, wanted)


def test_min_p_alone_keeps_what_is_likely_enough_and_always_the_likeliest():
    logits = as_float32([math.log(p) for p in (0.4, 0.2, 0.1, 0.3)])
    for min_p, kept in ((0.0, {0, 1, 2, 3}), (0.4, {0, 1, 3}), (0.6, {0, 3}), (1.0, {0})):
        wanted = replace(WARM, min_p=min_p)
        assert {draw(logits, replace(wanted, seed=seed)).token_id for seed in range(200)} == kept
    assert {draw([1.0, 1.0, 0.0], replace(WARM, min_p=1.0, seed=seed)).token_id for seed in range(60)} == {0, 1}


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.7])
def test_min_p_equals_the_reference(min_p):
    generator = torch.Generator().manual_seed(6)
    logits = 3 * torch.randn(1, 500, generator=generator)
    kept = MinPLogitsWarper(min_p)(torch.zeros(1, 0), logits.clone())[0].isfinite().nonzero().flatten().tolist()
    assert set(survivors(logits[0].tolist(), replace(WARM, min_p=min_p))) == set(kept)


def test_biases_come_before_penalties_and_the_ban_after_both():
    """Bias makes id 0 positive, so the penalty divides it; id 1 would win but for its ban."""
    history = TokenHistory(4.0, 0.0, 0.0, num_prompt_tokens=2, vocab_size=4, device=torch.device("cpu"))
    history.take(0, torch.tensor([0, 0]))
    wanted = replace(GREEDY, bias=((0, 8.0), (1, 50.0)), history=history, ban=(1,))
    assert draw([-1.0, 0.0, 1.5, 1.6], wanted).token_id == 0  # (−1 + 8) / 4 = 1.75
    assert draw([-1.0, 0.0, 1.5, 1.8], wanted).token_id == 3
    assert draw([-1.0, 0.0, 1.5, 1.8], replace(wanted, ban=())).token_id == 1


def test_a_bias_moves_seeded_draws_only_through_the_logits():
    logits = as_float32([0.5, 1.0, -2.0, 0.0])
    biased = as_float32([0.5, -1.0, 0.25, 0.0])
    for seed in range(50):
        wanted = replace(WARM, bias=((1, -2.0), (2, 2.25)), seed=seed)
        assert draw(logits, wanted).token_id == draw(biased, replace(WARM, seed=seed)).token_id


def test_ties_at_the_edge_of_top_k_and_of_the_nucleus_keep_the_lowest_ids():
    logits = [0.0, 1.0, 1.0, 1.0, 0.0]
    drawn = {draw(logits, replace(WARM, top_k=2, seed=seed)).token_id for seed in range(200)}
    assert drawn == {1, 2}
    drawn = {draw([1.0] * 10, replace(WARM, top_p=0.25, seed=seed)).token_id for seed in range(200)}
    assert drawn == {0, 1, 2}


def test_top_p_always_keeps_one_token():
    assert all(draw([0.0, 2.0, 1.0], replace(WARM, top_p=1e-9, seed=seed)).token_id == 1 for seed in range(50))


@pytest.mark.parametrize(
    "wanted",
    [
        WARM,
        replace(WARM, temperature=0.5),
        replace(WARM, temperature=2.0, top_k=4),
        replace(WARM, top_p=0.8),
        replace(WARM, temperature=1.3, top_k=5, top_p=0.9),
    ],
    ids=["plain", "cold", "top_k", "top_p", "all"],
)
def test_frequencies_match_the_probabilities(wanted):
    """Chi-square of 4000 draws at fixed seeds; 24.3 is the 0.9999 quantile at 5 degrees of freedom, fewer have smaller ones."""
    logits, count = as_float32([0.3, -1.0, 1.2, 0.8, -0.2, 0.1]), 4000
    exact = survivors(logits, wanted)
    rows = [replace(wanted, seed=i // 8 * 7919, output_index=i % 8) for i in range(count)]
    seen = dict.fromkeys(range(len(logits)), 0)
    for got in sample(torch.tensor([logits]).expand(count, -1), rows):
        seen[got.token_id] += 1
    assert all(seen[i] == 0 for i in seen if i not in exact)
    assert sum((seen[i] - count * p) ** 2 / (count * p) for i, p in exact.items()) < 24.3


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(12, 3000, generator=generator)
    rows = [
        RowSampling(
            temperature=(0.0, 0.8, 1.3)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            top_k=(0, 50)[i % 5 == 0],
            seed=i,
            output_index=i,
            top_logprobs=i % 4,
        )
        for i in range(12)
    ]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(12)]
    order = random.Random(2).sample(range(12), 12)
    assert sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_inputs_are_not_changed():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    sample(logits, [replace(WARM, ban=(2,), top_p=0.5)])
    assert logits.tolist() == [[1.0, 2.0, 3.0]]


def test_no_rows_no_draws():
    assert sample(torch.empty(0, 10), []) == []


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 1e-300, 5e-324])
def test_tiny_temperatures_are_greedy_among_ties_and_never_overflow(temperature):
    logits = [65504.0, 1.0, 65504.0, -65504.0]
    drawn = {draw(logits, replace(WARM, temperature=temperature, seed=seed)).token_id for seed in range(60)}
    assert drawn == {0, 2}


@pytest.mark.parametrize("wanted", [GREEDY, WARM, replace(WARM, top_p=0.9), replace(WARM, top_k=3)])
@pytest.mark.parametrize("broken", [[NAN, 1.0, 2.0, 0.0], [1.0, NAN, 9.0, 0.0], [INF, 1.0, 2.0, 0.0], [-INF] * 4])
def test_logits_that_are_not_finite_fail_their_row_alone(broken, wanted):
    good = [0.5, 4.0, -1.0, 2.0]
    first, second, third = sample(torch.tensor([good, broken, good]), [wanted] * 3)
    assert second.error == "the logits are not finite"
    assert first == third == draw(good, wanted)
    assert first.error is None


def test_minus_infinity_is_a_probability_of_zero():
    for wanted in (WARM, replace(WARM, top_k=3), replace(WARM, top_p=0.999999)):
        assert {draw([-INF, 1.0, -INF, 1.0], replace(wanted, seed=seed)).token_id for seed in range(60)} == {1, 3}


@pytest.mark.parametrize(("point", "token"), [(0.0, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_points_on_an_edge_of_the_cdf_never_draw_a_probability_of_zero(monkeypatch, point, token):
    monkeypatch.setattr(sampler, "uniform", lambda seed, output_index: point)
    for wanted in (WARM, replace(WARM, top_k=4)):
        assert draw([-INF, 1.0, -INF, 1.0, -INF], wanted).token_id == token


def test_banned_ids_are_not_drawn():
    logits = [5.0, 1.0, 4.0, 0.0]
    assert draw(logits, replace(GREEDY, ban=(0,))).token_id == 2
    drawn = {draw(logits, replace(WARM, temperature=3.0, ban=(0, 3), seed=seed)).token_id for seed in range(100)}
    assert drawn == {1, 2}
    assert draw(logits, replace(GREEDY, ban=(3, 2, 1, 0))).error == "every token is banned"


def test_logprobs_are_those_of_the_raw_logits():
    generator = torch.Generator().manual_seed(4)
    logits = 4 * torch.randn(1, 2000, generator=generator)
    raw = torch.log_softmax(logits[0].double(), 0)
    best = int(logits.argmax())
    (got,) = sample(logits, [replace(WARM, temperature=0.3, top_k=5, ban=(best,), seed=8, top_logprobs=6)])
    assert got.token_id != best
    assert got.logprobs.of_token == pytest.approx(float(raw[got.token_id]), abs=1e-9)
    assert [i for i, _ in got.logprobs.top] == raw.topk(6).indices.tolist()
    assert [p for _, p in got.logprobs.top] == pytest.approx(raw.topk(6).values.tolist(), abs=1e-9)


def test_logprobs_come_only_when_asked_for():
    assert draw([1.0, 2.0], GREEDY).logprobs is None
    alone = draw([1.0, 2.0], replace(GREEDY, logprobs=True)).logprobs
    assert (alone.of_token, alone.top) == (pytest.approx(-math.log1p(math.exp(-1))), ())


def test_reported_alternatives_are_ordered_by_id_within_ties():
    got = draw([1.0, 2.0, 1.0, 2.0, 1.0], replace(GREEDY, top_logprobs=4))
    assert [i for i, _ in got.logprobs.top] == [1, 3, 0, 2]
    assert [i for i, _ in draw([1.0, 2.0], replace(GREEDY, top_logprobs=4)).logprobs.top] == [1, 0]


def test_uniform_is_the_documented_function():
    """The first digest bytes, written out; a change of the function would change every seeded answer."""
    assert uniform(0, 0) == (int.from_bytes(bytes.fromhex("374708fff7719dd5"), "little") >> 11) / 2**53
    assert uniform(2**64 - 1, 7) == (int.from_bytes(bytes.fromhex("49491bc7943986d9"), "little") >> 11) / 2**53


def test_uniform_is_uniform():
    points = [uniform(seed, index) for seed in range(200) for index in range(20)]
    assert all(0 <= point < 1 for point in points)
    assert len(set(points)) == len(points)
    counts = [sum(low / 10 <= point < (low + 1) / 10 for point in points) for low in range(10)]
    assert sum((count - 400) ** 2 / 400 for count in counts) < 33.7  # 0.9999 quantile at 9 degrees of freedom
