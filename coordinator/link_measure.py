"""What the exchanges of a group cost, timed by its members right after it was opened."""

import time
from collections.abc import Mapping, Sequence

from coordinator.rank_link import RankLink
from coordinator.tasks import all_or_first_error
from coordinator.timings import Timings
from cp_layout.rates import Exchange, Link, link_of
from cp_wire.pb import rank_pb2

STAGES = ((1 << 12, 16), (1 << 16, 8), (1 << 20, 8))
"""Bytes that each member brings, and calls that are timed: ascending, so that each tells whether there is time for the next."""


def has_time(last: Exchange | None, received_bytes: int, calls: int, left_s: float) -> bool:
    """Whether so many larger exchanges fit into the time, should they take as long per byte as the last ones."""
    return left_s > 0 if last is None else calls * last.seconds * received_bytes / last.received_bytes <= left_s


async def measure(group: str, ranks: Sequence[int], links: Mapping[int, RankLink], timings: Timings) -> Link | None:
    """Times all-gathers of several sizes, the slowest member's median of each; None where `measure_s` is too short for two.

    The group has at least two members. Raises RankFault.
    """
    end = time.monotonic() + timings.measure_s
    exchanges: list[Exchange] = []
    for payload, repeats in STAGES:
        received = (len(ranks) - 1) * payload
        last = exchanges[-1] if exchanges else None
        if not has_time(last, received, repeats + 1, end - time.monotonic()):
            break
        command = rank_pb2.MeasureGroup(
            group=group, payload_bytes=payload, repeats=repeats, timeout_ms=round(1000 * timings.open_group_s)
        )
        deadline_s = timings.open_group_s + timings.step_margin_s
        answers = await all_or_first_error(links[rank].lane.send("measure_group", command, deadline_s) for rank in ranks)
        exchanges.append(Exchange(received, max(answer.group_measured.seconds for answer in answers)))
    return link_of(exchanges) if len(exchanges) > 1 else None
