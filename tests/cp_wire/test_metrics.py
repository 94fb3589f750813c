"""Families of metrics, made from statuses and read back as a scraper reads them."""

import re
from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cp_wire.metrics import CLUSTER_STATES, RANK_STATES, families
from cp_wire.pb import common_pb2, coordinator_pb2

DOCUMENTED = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


class Status:
    """A collector of one status."""

    def __init__(self, status: coordinator_pb2.GetStatusResponse) -> None:
        self.status = status

    def collect(self):
        return families(self.status)


def samples(**fields) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Value by name without `kvloom_` and labels, in the order of their names."""
    text = generate_latest(Status(coordinator_pb2.GetStatusResponse(**fields))).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name.removeprefix("kvloom_"), tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def of(found, name: str) -> dict[str, float]:
    """The series of one name, by the values of their labels."""
    return {" ".join(value for _, value in labels): number for (each, labels), number in found.items() if each == name}


def side(role: str, block_size: int) -> coordinator_pb2.SideStatus:
    return coordinator_pb2.SideStatus(role=role, config=common_pb2.ClusterConfig(block_size=block_size))


def rank(number: int, state: str, total: int = 0, free: int = 0, role: str = "mixed") -> coordinator_pb2.RankStatus:
    return coordinator_pb2.RankStatus(rank=number, role=role, state=state, kv_blocks_total=total, kv_blocks_free=free)


def test_requests_by_outcome_tokens_and_queues():
    outcomes = [coordinator_pb2.OutcomeCount(outcome=word, requests=n) for word, n in (("stop", 3), ("unavailable", 1))]
    counts = coordinator_pb2.RequestCounts(outcomes=outcomes, prompt_tokens=70, output_tokens=8)
    found = samples(requests=counts, running=2, waiting=5)
    assert of(found, "requests_total") == {"stop": 3, "unavailable": 1}
    values = [
        of(found, name)[""] for name in ("prompt_tokens_total", "output_tokens_total", "requests_running", "requests_waiting")
    ]
    assert values == [70, 8, 2, 5]


def test_states_of_cluster_and_ranks():
    found = samples(state="degraded", sides=[side("mixed", 16)], ranks=[rank(0, "ready"), rank(1, "lost"), rank(2, "ready")])
    assert of(found, "cluster_state") == {state: state == "degraded" for state in CLUSTER_STATES}
    assert of(found, "ranks") == {f"mixed {state}": {"ready": 2, "lost": 1}.get(state, 0) for state in RANK_STATES}


def test_f8_blocks_used_and_all_with_the_size_of_one():
    ranks = [rank(0, "ready", 10, 4, "prefill"), rank(1, "ready", 20, 20, "decode")]
    found = samples(ranks=ranks, sides=[side("prefill", 16), side("decode", 32)], kv_capacity_tokens=640)
    assert of(found, "kv_blocks") == {"0 prefill": 10, "1 decode": 20}
    assert of(found, "kv_blocks_used") == {"0 prefill": 6, "1 decode": 0}
    assert of(found, "kv_block_size_tokens") == {"prefill": 16, "decode": 32}
    assert of(found, "kv_capacity_tokens") == {"": 640}


def test_f2_hits_and_the_unit_they_come_in():
    cache = coordinator_pb2.PrefixCacheStatus(
        hit_unit_tokens=32, queried_tokens=130, hit_tokens=64, recomputed_tokens=7, preemptions=2
    )
    found = samples(prefix_cache=cache)
    assert of(found, "prefix_cache_hit_unit_tokens") == {"": 32}
    assert (of(found, "prefix_cache_queried_tokens_total"), of(found, "prefix_cache_hit_tokens_total")) == ({"": 130}, {"": 64})
    assert (of(found, "preemptions_total"), of(found, "recomputed_tokens_total")) == ({"": 2}, {"": 7})


def test_steps_by_decode_mode_and_gather():
    counts = [
        coordinator_pb2.StepCount(decode_mode=mode, gather=gather, steps=steps)
        for mode, gather, steps in (
            (common_pb2.DECODE_MODE_OWNER, common_pb2.GATHER_KV_ALL, 4),
            (common_pb2.DECODE_MODE_SPLIT, common_pb2.GATHER_NONE, 9),
        )
    ]
    assert of(samples(step_counts=counts), "steps_total") == {"owner kv_all": 4, "split none": 9}


def test_the_histogram_of_steps_adds_up():
    durations = coordinator_pb2.Histogram(bounds_s=[0.01, 0.1], counts=[2, 3, 1], sum_s=1.5)
    times = coordinator_pb2.StepTimes(durations=durations, total_rank_s=1.25, total_collective_s=0.5, plans=3)
    found = samples(step_times=times)
    assert of(found, "step_duration_seconds_bucket") == {"0.01": 2, "0.1": 5, "+Inf": 6}
    assert of(found, "step_duration_seconds_count") == {"": 6}
    assert of(found, "step_duration_seconds_sum") == {"": 1.5}
    assert of(found, "plans_total") == {"": 3}
    assert of(found, "step_rank_seconds_total") == {"": 1.25}
    assert of(found, "step_collective_seconds_total") == {"": 0.5}


def test_links_in_seconds_and_bytes():
    link = coordinator_pb2.LinkStatus(
        group="dcp:0", latency_us=25, bytes_per_s=2e9, measured_latency_us=1, measured_bytes_per_s=1
    )
    found = samples(links=[link])
    assert of(found, "link_latency_seconds") == pytest.approx({"dcp:0": 25e-6})
    assert of(found, "link_bandwidth_bytes_per_second") == {"dcp:0": 2e9}


def test_f7_loaded_kv_and_what_did_not_come():
    lost = [coordinator_pb2.CauseCount(cause="UNAVAILABLE", requests=2)]
    moved = coordinator_pb2.TransferStatus(
        requests=3, messages=8, payload_bytes=4096, shared_bytes=1024, seconds=0.5, retries=1, recomputed=lost, failed=lost
    )
    found = samples(transfers=moved)
    names = ("bytes", "shared_bytes", "messages", "requests")
    assert [of(found, f"kv_loaded_{name}_total")[""] for name in names] == [4096, 1024, 8, 3]
    assert [of(found, f"kv_load_{name}_total")[""] for name in ("seconds", "retries")] == [0.5, 1]
    for kind in ("recomputed", "failed"):
        assert of(found, f"kv_load_{kind}_requests_total") == {"UNAVAILABLE": 2}


def test_an_empty_status_has_every_family():
    names = {family.name for family in families(coordinator_pb2.GetStatusResponse())}
    full = {family.name for family in families(coordinator_pb2.GetStatusResponse(ranks=[rank(0, "ready")], running=1))}
    assert names == full and all(name.startswith("kvloom_") for name in names)


def test_the_page_about_metrics_lists_all_of_them():
    listed = set(re.findall(r"^\| `(kvloom_\w+)`", DOCUMENTED.read_text(), re.MULTILINE))
    empty = families(coordinator_pb2.GetStatusResponse())
    assert listed == {f"{family.name}_total" if family.type == "counter" else family.name for family in empty}
