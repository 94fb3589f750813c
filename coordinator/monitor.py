"""When a rank counts as lost although its lane is open."""

import asyncio

import grpc

from coordinator.own_time import Span, Wait, stall, wait, wait_out
from coordinator.rank_link import RankLink
from coordinator.timings import Timings
from cp_wire.logs import get_logger
from cp_wire.pb import rank_pb2

log = get_logger("coordinator.monitor")


def verdict(progress: rank_pb2.GetProgressResponse, instance: str, stalled_s: float, stall_limit_s: float | None) -> str | None:
    """Why a rank that gave this answer is to be fenced; None = it is well.

    stalled_s: for how long its worker has been without progress, as far as that counts.
    stall_limit_s belongs to the command it says it runs; None = that command may take any time.
    """
    if progress.instance != instance:
        return "another process answers in its place"
    idle = progress.running_sequence == 0
    if idle or stall_limit_s is None or stalled_s <= stall_limit_s:
        return None
    return f"no progress for {stalled_s:.1f} s, the limit is {stall_limit_s:.1f} s"


async def watch(link: RankLink, timings: Timings, wait: Wait = wait) -> str:
    """Polls the rank until it is to be fenced; returns the reason. Time by which our own waits end late is forgiven."""
    stalled, pause = Span(), Span()
    while True:
        deadline_s = timings.loading_poll_deadline_s if link.configured is None else timings.poll_deadline_s
        try:
            progress, silence = await _ask(link, deadline_s, timings, wait)
        except TimeoutError:
            return f"no answer for {deadline_s:g} s"
        except grpc.RpcError as error:
            return f"it does not answer ({error.code().name})"
        if silence.wall_s >= deadline_s:
            log.warning("late answer forgiven", rank=link.rank, after_s=silence.wall_s, held_up_s=silence.held_up_s)
        link.last_progress_ms = progress.last_progress_ms
        link.load_fraction = progress.load_fraction
        stalled = stall(stalled, pause + silence, progress.last_progress_ms / 1000)
        limit_s = link.lane.stall_limit_s(progress.running_sequence)
        reason = verdict(progress, link.instance, stalled.counted_s(timings.forgiven_s), limit_s)
        if reason is not None:
            return reason
        pause = await wait(None, timings.poll_interval_s)


async def _ask(link: RankLink, deadline_s: float, timings: Timings, wait: Wait) -> tuple[rank_pb2.GetProgressResponse, Span]:
    """The answer to one poll and how long it took; TimeoutError once deadline_s of the silence count; grpc.RpcError."""
    answer = asyncio.ensure_future(link.progress(deadline_s + timings.forgiven_s))
    # Nobody looks any more at a call that fails while this one is cancelled.
    answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        silence = await wait_out(answer, deadline_s, timings.look_s, timings.forgiven_s, wait)
        if answer.done():
            return answer.result(), silence
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
    finally:
        answer.cancel()
    raise TimeoutError
