"""The cluster's status as a message."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.cluster import MIXED
from coordinator.handover import Handover
from coordinator.rank_set import RankSet, Seat
from coordinator.request_stats import RequestStats
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


@dataclass(frozen=True, slots=True)
class View:
    """What a status is about. sets: all. homes: those that compute outputs. sides: role and configuration in force, that for
    outputs last. prompts, outputs: layouts of the KV where either is computed."""

    sets: Sequence[RankSet]
    homes: Sequence[RankSet]
    sides: Sequence[tuple[str, common_pb2.ClusterConfig]]
    prompts: Layout
    outputs: Layout
    handover: Handover | None
    requests: RequestStats


def cluster_status(view: View, state: str, last_steps: int = 0) -> coordinator_pb2.GetStatusResponse:
    """A snapshot; nothing in it can fail, and its cost does not depend on the requests."""
    sets = view.sets
    homes = [home.engine.scheduler for home in view.homes if home.engine is not None]
    schedulers = [home.engine.scheduler for home in sets if home.engine is not None]
    stats = [scheduler.stats for scheduler in schedulers]
    meter = StepMeter.merged([home.engine.meter for home in sets if home.engine is not None], last_steps)
    status = coordinator_pb2.GetStatusResponse(
        ranks=[_rank(home, seat) for home in sets for seat in home.seats.values()],
        groups=[
            coordinator_pb2.GroupStatus(name=_group_name(home, name), ranks=ranks, epoch=home.epoch)
            for home in sets
            for name, ranks in home.spec.groups.items()
        ],
        running=sum(scheduler.seated for scheduler in homes),
        waiting=sum(scheduler.waiting for scheduler in homes) + (view.handover.waiting if view.handover else 0),
        config=view.sides[-1][1],
        sides=[coordinator_pb2.SideStatus(role=role, config=config) for role, config in view.sides],
        state=state,
        step_times=meter.report(),
        step_counts=[
            coordinator_pb2.StepCount(decode_mode=mode_on_wire(mode), gather=gather_on_wire(gather), steps=steps)
            for (mode, gather), steps in sorted(meter.ways.items(), key=lambda item: (item[0][0].value, item[0][1].value))
        ],
        kv_capacity_tokens=sum(group_capacity_tokens(view.outputs, home.pool_blocks) for home in view.homes),
    )
    status.requests.CopyFrom(view.requests.report())
    status.links.extend(link for home in sets for link in _links(home))
    status.prefix_cache.hit_unit_tokens = view.prompts.virtual_block_size
    for name in ("queried_tokens", "hit_tokens", "recomputed_tokens", "preemptions"):
        setattr(status.prefix_cache, name, sum(getattr(counters, name) for counters in stats))
    if view.handover is not None:
        status.transfers.CopyFrom(view.handover.stats.report())
    return status


def _group_name(home: RankSet, name: str) -> str:
    """The sides count their groups alike."""
    return name if home.spec.role == MIXED else f"{home.spec.role}.{name}"


def _links(home: RankSet) -> list[coordinator_pb2.LinkStatus]:
    """What is known of the exchanges between a set's replicas; nothing before it was measured."""
    measured = home.engine.pricing.link if home.engine is not None else None
    if home.engine is None or measured is None:
        return []
    rates = home.engine.pricing.prices.rates
    return [
        coordinator_pb2.LinkStatus(
            group=_group_name(home, home.spec.replica_group or ""),
            measured_latency_us=1e6 * measured.latency_s,
            measured_bytes_per_s=1 / measured.s_per_byte,
            latency_us=1e6 * rates.round,
            bytes_per_s=1 / rates.wire_byte,
            rates=coordinator_pb2.WorkRates(**rates._asdict()),
        )
    ]


def _rank(home: RankSet, seat: Seat) -> coordinator_pb2.RankStatus:
    status = coordinator_pb2.RankStatus(
        rank=seat.rank,
        role=home.spec.role,
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
