"""Prices that follow links and steps."""

from coordinator.choice import Prices
from coordinator.plan import DecodeMode, Gather, Row, ScheduledStep
from coordinator.pricing import Pricing
from cp_layout.cost import CostModel, Rates, StepFacts
from cp_layout.grid import Grid
from cp_layout.rates import Link
from tests.coordinator.harness import SHAPE

MODEL = CostModel.of(SHAPE, Grid(1, 2, 2), 1000, "float32", "float32")
FACTS = StepFacts(prefill_rows=1, prefill_tokens=64, prefill_context=64, prefill_pairs=64 * 96)


def step(mode: DecodeMode, gather: Gather, *rows: Row) -> ScheduledStep:
    return ScheduledStep((), (), rows, mode, gather, 1, FACTS)


ROW = Row(1, 64, (7,) * 64, (), False, 0, False)


def test_a_link_is_known_once_it_is_measured() -> None:
    pricing = Pricing(MODEL)
    assert (pricing.link, pricing.prices) == (None, Prices(MODEL, Rates()))
    pricing.take_link(Link(2e-4, 3e-9))
    assert pricing.link == Link(2e-4, 3e-9)
    assert pricing.prices.rates == Rates()._replace(round=2e-4, wire_byte=3e-9)


def test_steps_that_take_long_make_their_own_way_dear() -> None:
    """A step with many rounds teaches about rounds, whichever way it went."""
    for mode, gather, work in (
        (DecodeMode.OWNER, Gather.Q, MODEL.owner_q(FACTS)),
        (DecodeMode.OWNER, Gather.KV, MODEL.owner_kv(FACTS)),
        (DecodeMode.REPLICATED, Gather.NONE, MODEL.replicated(FACTS)),
        (DecodeMode.SPLIT, Gather.NONE, MODEL.split(FACTS)),
    ):
        pricing = Pricing(MODEL)
        before = pricing.prices
        for _ in range(100):
            pricing.observe(step(mode, gather, ROW), 3 * before.seconds(work))
        assert 2.9 < pricing.prices.seconds(work) / before.seconds(work) < 3.1


def test_a_step_without_rows_says_nothing() -> None:
    pricing = Pricing(MODEL)
    pricing.observe(step(DecodeMode.REPLICATED, Gather.NONE), 9.0)
    assert pricing.prices.rates == Rates()
