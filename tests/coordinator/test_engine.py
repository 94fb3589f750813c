"""What the step loop sends and measures."""

import asyncio

import pytest

from coordinator.plan import DecodeMode, Gather, Row, Sampling, ScheduledStep
from coordinator.predict import StepPredictor
from coordinator.request import Request
from coordinator.scheduler import Scheduler, SchedulerConfig
from coordinator.step_times import StepMeter
from coordinator.text_rows import LiveRequest, TextRow, to_text
from coordinator.wire_plan import to_step_plan
from cp_layout.interleave import Layout
from cp_wire.pb import common_pb2
from tests.coordinator.fake_rank import continuation
from tests.coordinator.harness import FakeDetokenizer, cluster


@pytest.mark.parametrize("shards", [1, 2])
def test_decode_plan_does_not_grow_with_the_context(shards):
    """Between 512 and 8192 tokens only the varint of the position may grow, by one byte."""
    sizes = {}
    for context in (512, 8192):
        scheduler = Scheduler(SchedulerConfig(4, 16384, 4), Layout(shards, 16, 16), 1024, b"identity")
        sampling = Sampling(temperature=0.0, max_tokens=64)
        scheduler.add(Request(handle=1, request_id="r", prompt=[7] * context, sampling=sampling, salt=b""))
        plans = []
        for _ in range(8):
            step = scheduler.schedule()
            plans.append(to_step_plan(step, ticket=100, timeout_ms=10_000))
            scheduler.commit(step, {1: 9})
        decode = [plan for plan in plans[2:] if not plan.rows[0].new_block_ids]
        sizes[context] = max(plan.ByteSize() for plan in decode)
    assert sizes[8192] <= sizes[512] + 1
    assert sizes[512] < 64


async def test_status_reports_steps_and_their_cost():
    async with cluster(pcp=2, dcp=2) as harness:
        await harness.generate([1, 2, 3], max_tokens=20)
        times = (await harness.status()).step_times
        assert times.steps >= 20 > times.plans >= 2
        assert times.step_ms >= times.rank_ms > 0
        assert times.overhead_ms > 0
        assert 0 < times.last_plan_bytes < 64


async def test_all_ranks_get_the_same_plans_and_tickets_grow():
    async with cluster(pcp=2, dcp=2) as harness:
        await harness.generate(list(range(30)), max_tokens=5)
        await harness.until_idle()
        first, second = (rank.steps for rank in harness.ranks)
        assert first == second
        tickets = [plan.ticket for plan in first]
        assert sorted(set(tickets)) == list(range(1, len(set(tickets)) + 1)) and tickets == sorted(tickets)
        assert all(plan.timeout_ms >= 1000 for plan in first)


async def test_l1_bounds_of_a_step_grow_with_its_predicted_time(monkeypatch):
    monkeypatch.setattr(StepPredictor, "predict", lambda self, facts: 2.5 * (facts.prefill_tokens + facts.decode_rows))
    async with cluster() as harness:
        task = asyncio.create_task(harness.generate([1, 2, 3], max_tokens=2))
        await harness.ranks[0].hold()
        lane = harness.home.seats[0].link.lane
        limits = [limit for sequence in range(1, 9) if (limit := lane.stall_limit_s(sequence)) is not None]
        assert limits == [4 * 2.5 * 3]
        harness.ranks[0].gate.set()
        await task
        assert [plan.timeout_ms for plan in harness.ranks[0].steps if plan.rows] == [30_000, 10_000]


@pytest.mark.parametrize(
    ("mode", "gather"), [*((m, Gather.NONE) for m in DecodeMode), *((DecodeMode.OWNER, g) for g in Gather)]
)
def test_way_of_computing_is_the_schedulers_choice_and_travels(mode, gather):
    step = ScheduledStep(released=(), admitted=(), rows=(), decode_mode=mode, gather=gather, cost_version=3)
    plan = to_step_plan(step, ticket=1, timeout_ms=1)
    assert common_pb2.DecodeMode.Name(plan.decode_mode) == f"DECODE_MODE_{mode.name}"
    assert common_pb2.Gather.Name(plan.gather) == f"GATHER_{gather.name}"
    assert plan.cost_version == 3


async def test_e2_preemption_leaves_no_gap_and_no_repeat():
    async with cluster(kv_cache_tokens_per_rank=48, max_num_seqs=4) as harness:
        prompts = [[index] * 10 for index in range(4)]
        heard = await asyncio.gather(*(harness.generate(prompt, max_tokens=30) for prompt in prompts))
        for prompt, one in zip(prompts, heard, strict=True):
            assert one.token_ids == continuation(prompt, 30)
        assert (await harness.status()).prefix_cache.preemptions > 0
        assert sum(one.finished.recomputed_tokens for one in heard) > 0
        await harness.until_idle()


ROW = Row(1, 0, (7,), (), False, 0, False)


def ran(mode: DecodeMode, gather: Gather, *rows: Row) -> ScheduledStep:
    return ScheduledStep((1,), (), rows, mode, gather, 0)


def test_meter_reports_medians_and_merges():
    first, second, step = StepMeter(), StepMeter(), ran(DecodeMode.OWNER, Gather.Q, ROW)
    assert first.report().steps == 0
    first.record(step, 0.010, 0.008, 0.001, 40)
    first.record(step, 0.012, 0.008, 0.002, 30)
    second.record(step, 0.020, 0.008, 0.004, 35)
    second.record(step, 0.008, 0.008, 0.004, 0)
    report = StepMeter.merged([first, second]).report()
    assert (report.steps, report.plans, report.last_plan_bytes) == (4, 3, 35)
    assert (second.report().plans, second.report().last_plan_bytes) == (1, 35)
    assert (report.step_ms, report.rank_ms, report.overhead_ms) == pytest.approx((11, 8, 3))
    assert (report.total_rank_s, report.total_collective_s, report.durations.sum_s) == pytest.approx((0.032, 0.011, 0.050))


def test_meter_counts_steps_by_their_duration_the_bound_included():
    meter, step = StepMeter(), ran(DecodeMode.OWNER, Gather.Q, ROW)
    for wall_s in (0.0001, 0.001, 0.0011, 10.0, 11.0):
        meter.record(step, wall_s, wall_s, 0.0, 1)
    for report in (meter.report(), StepMeter.merged([meter], 1).report()):
        counted = dict(zip([*report.durations.bounds_s, None], report.durations.counts, strict=True))
        assert {bound: count for bound, count in counted.items() if count} == {0.001: 2, 0.0025: 1, 10.0: 1, None: 1}


def test_meter_counts_the_ways_of_all_sets_and_no_step_without_rows():
    first, second = StepMeter(), StepMeter()
    first.record(ran(DecodeMode.OWNER, Gather.Q, ROW), 1, 1, 0, 1)
    first.record(ran(DecodeMode.OWNER, Gather.KV, ROW), 1, 1, 0, 1)
    second.record(ran(DecodeMode.OWNER, Gather.Q, ROW), 1, 1, 0, 1)
    second.record(ran(DecodeMode.REPLICATED, Gather.NONE), 1, 1, 0, 1)
    both = StepMeter.merged([first, second])
    assert both.ways == {(DecodeMode.OWNER, Gather.Q): 2, (DecodeMode.OWNER, Gather.KV): 1}
    assert both.report().steps == 3


def live(stop: tuple[str, ...] = ()) -> LiveRequest:
    request = Request(handle=1, request_id="r", prompt=[1], sampling=Sampling(), salt=b"")
    return LiveRequest(request, FakeDetokenizer(stop, 0))


def test_token_after_a_stop_string_is_dropped():
    request = live(("bc",))
    rows = [TextRow(request, token) for token in (0, 1, 2, 3)]
    results = [result for row in rows for result in to_text([row])]
    assert [(result.text, result.finished) for result in results] == [("a", None), ("", None), ("", "stop")]


def test_held_text_comes_with_the_end():
    request = live(("bcd",))
    assert to_text([TextRow(request, 1)])[0].text == ""
    (last,) = to_text([TextRow(request, 2, finished="length")])
    assert (last.text, last.finished, last.token_ids) == ("bc", "length", (2,))


def test_failing_row_leaves_the_others_alone():
    broken, fine = live(("?",)), live()
    results = to_text([TextRow(broken, 0), TextRow(fine, 0)])
    assert [result.finished for result in results] == ["error", None]
    assert "RuntimeError" in results[0].error
    assert to_text([TextRow(broken, 1)]) == []


def test_step_times_of_the_last_steps_do_not_see_the_ones_before():
    """A benchmark asks for its own steps: 448 steps of 1 ms overhead may not hide 64 of 11 ms."""
    meter = StepMeter()
    for overhead_s in [0.001] * 448 + [0.011] * 64:
        meter.record(ran(DecodeMode.OWNER, Gather.Q, ROW), 0.1 + overhead_s, 0.1, 0.0, plan_bytes=13)
    assert StepMeter.merged([meter], 64).report().overhead_ms == pytest.approx(11)
    assert StepMeter.merged([meter]).report().overhead_ms == pytest.approx(1)
    assert StepMeter.merged([meter], 10_000).report().steps == 512
