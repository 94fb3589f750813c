"""How long steps are expected to take."""

import pytest

from coordinator.predict import StepPredictor, layer_parameters, prior_seconds_per_pair, prior_seconds_per_token
from cp_layout.cost import CostModel, StepFacts
from cp_layout.grid import Grid
from tests.coordinator.harness import SHAPE

LAYERS = 24
MATRICES_S, SHORT_S, LONG_S = 0.114, 0.022, 1.057
"""Measured of one layer of a small model: 512 tokens through the matrices, their attention alone and after LONG cached ones."""
LONG = 32768
PRIOR_PER_PAIR_S = 4 * 14 * 64 * LAYERS / 5e9


def prefill(context: int, tokens: int = 512) -> StepFacts:
    pairs = tokens * context + tokens * (tokens + 1) // 2
    return StepFacts(prefill_rows=1, prefill_tokens=tokens, prefill_context=context, prefill_pairs=pairs)


def decode(context: int, rows: int = 1) -> StepFacts:
    return StepFacts(decode_rows=rows, decode_context=rows * context)


def true_s(context: int) -> float:
    """Of a step with 512 new tokens."""
    return LAYERS * (MATRICES_S + SHORT_S + context / LONG * (LONG_S - SHORT_S))


@pytest.mark.parametrize("repeats", [1, 20, 1000])
@pytest.mark.parametrize("shorts", [(0,), (0, 256), (0, 4096)], ids=str)
def test_l1_a_long_context_after_short_traffic_gets_its_time(shorts: tuple[int, ...], repeats: int) -> None:
    predictor = StepPredictor(1e-3, PRIOR_PER_PAIR_S)
    for _ in range(repeats):
        for context in shorts:
            predictor.observe(prefill(context), true_s(context))
        predictor.observe(decode(600), 0.05)
    assert 4 * predictor.predict(prefill(LONG)) >= true_s(LONG)


def test_l1_short_traffic_does_not_forget_what_long_contexts_took() -> None:
    predictor = StepPredictor(1e-3, PRIOR_PER_PAIR_S)
    for context in (0, 8192, LONG):
        predictor.observe(prefill(context), true_s(context))
    for _ in range(200):
        predictor.observe(prefill(0), true_s(0))
        predictor.observe(decode(100), 0.05)
    assert predictor.predict(prefill(LONG)) >= true_s(LONG)


def test_rates_that_were_far_too_slow_are_unlearnt() -> None:
    predictor = StepPredictor(1.0, 1000 * PRIOR_PER_PAIR_S)
    for _ in range(100):
        for context in (0, 8192, LONG):
            predictor.observe(prefill(context), true_s(context))
    for context in (0, 8192, LONG):
        assert true_s(context) <= 2 * predictor.predict(prefill(context)) <= 8 * true_s(context)


@pytest.mark.parametrize(
    "facts", [prefill(0), prefill(LONG), prefill(9, 3), decode(5), decode(LONG), decode(LONG, 64)], ids=str
)
@pytest.mark.parametrize("seconds", [1e-3, 1.0, 1000.0])
def test_a_prediction_is_never_below_the_last_report_of_the_same_work(facts: StepFacts, seconds: float) -> None:
    predictor = StepPredictor(1e-3, 1e-7)
    predictor.observe(prefill(512), 2.0)
    predictor.observe(decode(100), 0.1)
    predictor.observe(facts, seconds)
    assert predictor.predict(facts) >= seconds * (1 - 1e-9)


def test_a_prediction_grows_with_each_of_the_facts_and_changes_nothing() -> None:
    predictor = StepPredictor(1e-3, 1e-7)
    assert predictor.predict(prefill(100)) < predictor.predict(prefill(200)) < predictor.predict(prefill(200, 513))
    assert predictor.predict(decode(100)) < predictor.predict(decode(200)) < predictor.predict(decode(200, 2))
    assert predictor.predict(prefill(100)) == predictor.predict(prefill(100))


def test_a_slow_step_without_context_does_not_make_context_dear() -> None:
    predictor = StepPredictor(1e-3, 1e-7)
    for _ in range(20):
        predictor.observe(decode(20), 3.0)
    assert predictor.predict(decode(LONG)) < 3.1


def test_predictor_starts_slow_and_learns() -> None:
    predictor = StepPredictor(per_token_s=0.1, per_pair_s=0.0)
    wide = StepFacts(prefill_rows=1, prefill_tokens=100)
    one = StepFacts(decode_rows=1)
    assert predictor.predict(wide) == pytest.approx(10)
    predictor.observe(wide, 1.0)
    assert predictor.predict(wide) == pytest.approx(1.0)
    predictor.observe(one, 0.5)
    assert predictor.predict(one) == pytest.approx(0.51)
    predictor.observe(one, 0.3)
    assert predictor.predict(one) == pytest.approx(0.47)
    for _ in range(100):
        predictor.observe(one, 0.3)
    assert predictor.predict(one) == pytest.approx(0.31)


def test_priors_count_the_work_of_a_rank() -> None:
    layer = 8 * (2 * 8 + 2 * 4 + 3 * 16)
    parameters = 2 * layer + 96 * 8
    assert prior_seconds_per_token(SHAPE, tp=1) == pytest.approx(2 * parameters / 5e9)
    assert prior_seconds_per_token(SHAPE, tp=2) == pytest.approx(parameters / 5e9)
    model = CostModel.of(SHAPE, Grid(tp=1, pcp=1, dcp=1), layer_parameters(SHAPE), "float32", "float32")
    assert prior_seconds_per_pair(model) == pytest.approx(2 * 2 * 8 * 2 / 5e9)
