"""Metrics of a coordinator over fake ranks."""

import asyncio
import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.app import Options
from coordinator.request_stats import CANCELLED
from cp_wire.errors import PortInUse
from cp_wire.metrics import families
from tests.coordinator.fake_kv import BYTES_PER_TOKEN
from tests.coordinator.harness import FAST, cluster, eventually, listen
from tests.machine import free_port

ONE = {"tp": 1, "pcp": 1, "dcp": 1}


def value(harness, name: str, *labels: str) -> float:
    """Of the series with these values of labels; 0 where there is none."""
    found = [
        sample.value
        for family in families(harness.coordinator.status())
        for sample in family.samples
        if sample.name == f"kvloom_{name}" and tuple(sample.labels.values()) == labels
    ]
    return sum(found)


async def test_every_call_counts_once_by_its_outcome():
    async with cluster(pcp=2, dcp=2) as harness:
        await harness.generate([1, 2, 3], max_tokens=4)
        await harness.generate(list(range(1, 8)), max_tokens=5, n=2)
        await harness.generate([], max_tokens=4)
        assert value(harness, "requests_total", "length") == 2
        assert value(harness, "requests_total", "invalid_argument") == 1
        assert value(harness, "prompt_tokens_total") == 3 + 7
        assert value(harness, "output_tokens_total") == 4 + 2 * 5


async def test_a_client_that_leaves_is_cancelled_and_an_abort_is_none():
    async with cluster() as harness:
        call = harness.call([1, 2, 3], max_tokens=100)
        await anext(aiter(call))
        call.cancel()
        await eventually(lambda: value(harness, "requests_total", CANCELLED) == 1)
        aborted = harness.call([1, 2, 3], max_tokens=100, request_id="a")
        await anext(aiter(aborted))
        harness.coordinator.admission.abort("a")
        assert [event async for event in aborted][-1].finished.finish_reason == "abort"
        await eventually(lambda: value(harness, "requests_total", "abort") == 1)
        assert value(harness, "requests_total", CANCELLED) == 1


async def test_a_lost_rank_ends_a_request_as_unavailable():
    async with cluster(pcp=2, dcp=2) as harness:
        call = harness.call([1, 2, 3], max_tokens=100)
        await anext(aiter(call))
        await harness.ranks[1].die()
        assert (await listen(call)).error is not None
        await eventually(lambda: value(harness, "requests_total", "unavailable") == 1)


async def test_f2_hits_come_in_the_unit_that_is_told():
    async with cluster(pcp=2, dcp=2) as harness:
        unit = int(value(harness, "prefix_cache_hit_unit_tokens"))
        prompt = list(range(2 * unit + 1))
        for _ in range(2):
            await harness.generate(prompt, max_tokens=1)
        assert unit == 8
        assert value(harness, "prefix_cache_hit_tokens_total") == 2 * unit
        assert value(harness, "prefix_cache_queried_tokens_total") == 2 * len(prompt)


async def test_steps_are_counted_in_ways_and_in_durations():
    async with cluster(pcp=2, dcp=2) as harness:
        await harness.generate(list(range(1, 20)), max_tokens=6)
        await harness.until_idle()
        steps = harness.coordinator.status().step_times.steps
        metrics = {family.name: family for family in families(harness.coordinator.status())}
        assert sum(sample.value for sample in metrics["kvloom_steps"].samples) == steps >= 7
        assert value(harness, "step_duration_seconds_count") == steps
        assert value(harness, "step_duration_seconds_sum") >= value(harness, "step_rank_seconds_total") > 0


async def test_f7_kv_that_moved_is_counted_in_bytes():
    prompt = list(range(1, 40))
    async with cluster(prefill=ONE) as harness:
        await harness.generate(prompt, max_tokens=4)
        await harness.generate(prompt, max_tokens=4)
        assert value(harness, "kv_loaded_bytes_total") >= BYTES_PER_TOKEN * len(prompt)
        assert value(harness, "kv_loaded_requests_total") == 2
        assert value(harness, "kv_load_recomputed_requests_total") == 0


async def test_blocks_in_use_show_while_a_request_runs_and_are_given_back():
    async with cluster() as harness:
        total = value(harness, "kv_blocks", "mixed", "0")
        call = harness.call(list(range(1, 10)), max_tokens=100)
        await anext(aiter(call))
        await eventually(lambda: 3 <= value(harness, "kv_blocks_used", "mixed", "0") <= total)
        call.cancel()
        await eventually(lambda: value(harness, "kv_blocks_used", "mixed", "0") == 0)


async def scrape(port: int) -> str:
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        answer = (await reader.read()).decode()
        writer.close()
    return answer.partition("\r\n\r\n")[2]


async def test_a_port_that_is_asked_for_serves_them_until_the_end():
    port = free_port()
    async with cluster(options=Options(metrics_port=port)) as harness:
        await harness.generate([1, 2, 3], max_tokens=2)
        names = {family.name for family in text_string_to_metric_families(await scrape(port))}
        assert names == {family.name for family in families(harness.coordinator.status())}
    with pytest.raises(OSError):
        await scrape(port)


async def test_a_metrics_port_in_use_keeps_the_coordinator_from_starting():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}"):
            async with cluster(options=Options(metrics_port=port), timings=FAST):
                pass
