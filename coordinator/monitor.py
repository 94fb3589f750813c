"""When a rank counts as lost although its lane is open."""

import asyncio

import grpc

from coordinator.rank_link import RankLink
from coordinator.timings import Timings
from cp_wire.pb import rank_pb2


def verdict(progress: rank_pb2.GetProgressResponse, instance: str, stall_limit_s: float | None) -> str | None:
    """Why a rank that gave this answer is to be fenced; None = it is well.

    stall_limit_s belongs to the command it says it runs; None = that command may take any time.
    """
    if progress.instance != instance:
        return "another process answers in its place"
    idle = progress.running_sequence == 0
    if idle or stall_limit_s is None or progress.last_progress_ms <= stall_limit_s * 1000:
        return None
    return f"no progress for {progress.last_progress_ms / 1000:.1f} s, the limit is {stall_limit_s:.1f} s"


async def watch(link: RankLink, timings: Timings) -> str:
    """Polls the rank until it is to be fenced; returns the reason."""
    while True:
        deadline_s = timings.loading_poll_deadline_s if link.configured is None else timings.poll_deadline_s
        try:
            progress = await link.progress(deadline_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer for {deadline_s:g} s"
            return f"it does not answer ({error.code().name})"
        link.last_progress_ms = progress.last_progress_ms
        link.load_fraction = progress.load_fraction
        reason = verdict(progress, link.instance, link.lane.stall_limit_s(progress.running_sequence))
        if reason is not None:
            return reason
        await asyncio.sleep(timings.poll_interval_s)
