"""A cluster's status as families of metrics for Prometheus.

A pure function of the status that `kvloom status` shows: nothing is counted twice, and nothing is kept. Every label has a
closed set of values: ranks, roles, states, groups, modes, outcomes, causes; never a request, a client or a model.
"""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from cp_wire.pb import common_pb2, coordinator_pb2

Labels = Mapping[str, str]
ONE: Labels = {}
"""Labels of a family of one series."""

RANK_STATES = ("absent", "loading", "ready", "lost")
CLUSTER_STATES = ("starting", "serving", "degraded", "draining")


def families(status: coordinator_pb2.GetStatusResponse) -> list[Metric]:
    """All families, in a fixed order; seconds, bytes and tokens as their names say."""
    return [*_requests(status), *_blocks(status), *_prefix_cache(status), *_steps(status), *_links(status), *_loaded(status)]


def _requests(status: coordinator_pb2.GetStatusResponse) -> list[Metric]:
    requests, roles = status.requests, [side.role for side in status.sides]
    outcomes = [({"outcome": each.outcome}, each.requests) for each in requests.outcomes]
    ranks = [
        (
            {"role": role, "state": state},
            sum((rank.role, rank.state) == (role, state) for rank in status.ranks),
        )
        for role in roles
        for state in RANK_STATES
    ]
    states = [({"state": state}, state == status.state) for state in CLUSTER_STATES]
    return [
        _gauge("cluster_state", "1 for the state that the cluster is in", states),
        _gauge("ranks", "Ranks by state", ranks),
        _counter("requests", "Ended requests by outcome, refused ones included", outcomes),
        _counter("prompt_tokens", "Prompt tokens of accepted requests", [(ONE, requests.prompt_tokens)]),
        _counter("output_tokens", "Output tokens sent to clients", [(ONE, requests.output_tokens)]),
        _gauge("requests_running", "Requests that hold KV blocks", [(ONE, status.running)]),
        _gauge("requests_waiting", "Requests in the queues", [(ONE, status.waiting)]),
    ]


def _blocks(status: coordinator_pb2.GetStatusResponse) -> list[Metric]:
    ranks = [({"role": rank.role, "rank": str(rank.rank)}, rank) for rank in status.ranks]
    sizes = [({"role": side.role}, side.config.block_size) for side in status.sides]
    used = [(labels, rank.kv_blocks_total - rank.kv_blocks_free) for labels, rank in ranks]
    return [
        _gauge("kv_block_size_tokens", "Tokens of one KV block on one rank", sizes),
        _gauge("kv_blocks", "KV blocks of a rank's pool", [(labels, rank.kv_blocks_total) for labels, rank in ranks]),
        _gauge("kv_blocks_used", "KV blocks that are neither free nor evictable", used),
        _gauge("kv_capacity_tokens", "KV tokens that all pools for outputs hold together", [(ONE, status.kv_capacity_tokens)]),
    ]


def _prefix_cache(status: coordinator_pb2.GetStatusResponse) -> list[Metric]:
    cache = status.prefix_cache
    return [
        _gauge(
            "prefix_cache_hit_unit_tokens",
            "Tokens of a virtual block: hits are multiples of it, and at least one prompt token is always computed",
            [(ONE, cache.hit_unit_tokens)],
        ),
        _counter("prefix_cache_queried_tokens", "Prompt tokens that were looked for", [(ONE, cache.queried_tokens)]),
        _counter("prefix_cache_hit_tokens", "Prompt tokens that were found", [(ONE, cache.hit_tokens)]),
        _counter("preemptions", "Requests that gave their blocks to older ones", [(ONE, cache.preemptions)]),
        _counter("recomputed_tokens", "Tokens computed again after preemptions", [(ONE, cache.recomputed_tokens)]),
    ]


def _steps(status: coordinator_pb2.GetStatusResponse) -> list[Metric]:
    times = status.step_times
    ways = [
        (
            {"decode_mode": _word(common_pb2.DecodeMode, each.decode_mode), "gather": _word(common_pb2.Gather, each.gather)},
            each.steps,
        )
        for each in status.step_counts
    ]
    durations = HistogramMetricFamily("kvloom_step_duration_seconds", "Whole steps, on the coordinator")
    buckets, below = [], 0
    for bound, count in zip((*map(str, times.durations.bounds_s), "+Inf"), times.durations.counts, strict=False):
        below += count
        buckets.append((bound, below))
    durations.add_metric([], buckets or [("+Inf", 0)], times.durations.sum_s)
    return [
        _counter("steps", "Steps by how replicas shared them and what was gathered", ways),
        _counter("plans", "Plans that were sent for the steps", [(ONE, times.plans)]),
        durations,
        _counter("step_rank_seconds", "Time of the slowest rank, over all steps", [(ONE, times.total_rank_s)]),
        _counter(
            "step_collective_seconds",
            "Time in collectives of the rank that waited least in them, over all steps",
            [(ONE, times.total_collective_s)],
        ),
    ]


def _links(status: coordinator_pb2.GetStatusResponse) -> list[Metric]:
    links = [({"group": link.group}, link) for link in status.links]
    return [
        _gauge(
            "link_latency_seconds",
            "A collective of a set's replicas without payload, as steps have corrected it",
            [(labels, link.latency_us / 1e6) for labels, link in links],
        ),
        _gauge(
            "link_bandwidth_bytes_per_second",
            "What each replica receives in a collective, as steps have corrected it",
            [(labels, link.bytes_per_s) for labels, link in links],
        ),
    ]


def _loaded(status: coordinator_pb2.GetStatusResponse) -> list[Metric]:
    moved = status.transfers
    causes = {
        kind: [({"cause": each.cause}, each.requests) for each in counts]
        for kind, counts in (("recomputed", moved.recomputed), ("failed", moved.failed))
    }
    return [
        _counter("kv_loaded_bytes", "KV that came from prefill to decode ranks", [(ONE, moved.payload_bytes)]),
        _counter("kv_loaded_shared_bytes", "Part of it that was copied between pools of one host", [(ONE, moved.shared_bytes)]),
        _counter("kv_loaded_messages", "Messages in which it came", [(ONE, moved.messages)]),
        _counter("kv_loaded_requests", "Requests whose KV came as a whole", [(ONE, moved.requests)]),
        _counter("kv_load_seconds", "From the first call for a range of tokens to its last answer", [(ONE, moved.seconds)]),
        _counter("kv_load_retries", "Further attempts at single ranks", [(ONE, moved.retries)]),
        _counter("kv_load_recomputed_requests", "Requests computed by decode ranks, by cause", causes["recomputed"]),
        _counter("kv_load_failed_requests", "Requests that ended because their KV did not come, by cause", causes["failed"]),
    ]


def _word(enum: type, value: int) -> str:
    """owner for DECODE_MODE_OWNER."""
    names = enum.DESCRIPTOR.values_by_number  # type: ignore[attr-defined]
    prefix = enum.DESCRIPTOR.values_by_number[0].name.removesuffix("UNSPECIFIED")  # type: ignore[attr-defined]
    return str(names[value].name).removeprefix(prefix).lower()


def _counter(name: str, what: str, series: Iterable[tuple[Labels, float]]) -> Metric:
    return _filled(CounterMetricFamily, name, what, series)


def _gauge(name: str, what: str, series: Iterable[tuple[Labels, float]]) -> Metric:
    return _filled(GaugeMetricFamily, name, what, series)


def _filled(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, what: str, series: Iterable[tuple[Labels, float]]
) -> Metric:
    rows = list(series)
    metric = family(f"kvloom_{name}", what, labels=list(rows[0][0]) if rows else [])
    for labels, value in rows:
        metric.add_metric(list(labels.values()), value)
    return metric
