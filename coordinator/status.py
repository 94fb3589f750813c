"""The cluster's status as a message."""

from collections.abc import Sequence

from coordinator.rank_set import RankSet, Seat
from coordinator.step_times import StepMeter
from coordinator.wire_plan import gather_on_wire, mode_on_wire
from cp_layout.capacity import group_capacity_tokens
from cp_layout.interleave import Layout
from cp_wire.pb import common_pb2, coordinator_pb2


def cluster_state(sets: Sequence[RankSet], started: bool, draining: bool) -> str:
    """starting, serving, degraded or draining."""
    if draining:
        return "draining"
    if not started:
        return "starting"
    return "serving" if all(home.ready for home in sets) else "degraded"


def cluster_status(
    sets: Sequence[RankSet], config: common_pb2.ClusterConfig, state: str, layout: Layout, last_steps: int = 0
) -> coordinator_pb2.GetStatusResponse:
    """A snapshot; nothing in it can fail, and its cost does not depend on the requests."""
    schedulers = [home.engine.scheduler for home in sets if home.engine is not None]
    stats = [scheduler.stats for scheduler in schedulers]
    meter = StepMeter.merged([home.engine.meter for home in sets if home.engine is not None], last_steps)
    status = coordinator_pb2.GetStatusResponse(
        ranks=[_rank(home, seat) for home in sets for seat in home.seats.values()],
        groups=[
            coordinator_pb2.GroupStatus(name=name, ranks=ranks, epoch=home.epoch)
            for home in sets
            for name, ranks in home.spec.groups.items()
        ],
        running=sum(scheduler.running for scheduler in schedulers),
        waiting=sum(scheduler.waiting for scheduler in schedulers),
        config=config,
        state=state,
        step_times=meter.report(),
        step_counts=[
            coordinator_pb2.StepCount(decode_mode=mode_on_wire(mode), gather=gather_on_wire(gather), steps=steps)
            for (mode, gather), steps in sorted(meter.ways.items(), key=lambda item: (item[0][0].value, item[0][1].value))
        ],
        kv_capacity_tokens=sum(group_capacity_tokens(layout, home.pool_blocks) for home in sets),
    )
    status.links.extend(link for home in sets for link in _links(home))
    status.prefix_cache.hit_unit_tokens = layout.virtual_block_size
    for name in ("queried_tokens", "hit_tokens", "recomputed_tokens", "preemptions"):
        setattr(status.prefix_cache, name, sum(getattr(counters, name) for counters in stats))
    return status


def _links(home: RankSet) -> list[coordinator_pb2.LinkStatus]:
    """What is known of the exchanges between a set's replicas; nothing before it was measured."""
    measured = home.engine.pricing.link if home.engine is not None else None
    if home.engine is None or measured is None:
        return []
    rates = home.engine.pricing.prices.rates
    return [
        coordinator_pb2.LinkStatus(
            group=home.spec.replica_group or "",
            measured_latency_us=1e6 * measured.latency_s,
            measured_bytes_per_s=1 / measured.s_per_byte,
            latency_us=1e6 * rates.round,
            bytes_per_s=1 / rates.wire_byte,
        )
    ]


def _rank(home: RankSet, seat: Seat) -> coordinator_pb2.RankStatus:
    status = coordinator_pb2.RankStatus(
        rank=seat.rank,
        role="mixed",
        state=seat.state,
        instance=seat.last_instance,
        pid=seat.last_pid,
        fenced_reason=seat.fenced_reason,
    )
    if seat.link is not None:
        status.address = seat.link.address
        status.last_progress_ms = seat.link.last_progress_ms
        status.load_fraction = seat.link.load_fraction
        status.kv_blocks_total = seat.link.pool_blocks
        if home.engine is not None and seat.link.pool_blocks:
            status.kv_blocks_free = home.engine.scheduler.free_blocks[home.spec.member_of(seat.rank)]
    return status
