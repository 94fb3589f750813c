"""When a rank that still has a lane counts as lost."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from coordinator.monitor import verdict, watch
from coordinator.own_time import waited
from coordinator.timings import Timings
from cp_wire.channels import options
from cp_wire.pb import rank_pb2

LIMIT_S = 5.0
TIMINGS = replace(Timings(), look_s=0.25, poll_interval_s=0.5, poll_deadline_s=2.0, forgiven_s=20.0)


def progress(running: int, age_ms: int = 0, instance: str = "life") -> rank_pb2.GetProgressResponse:
    return rank_pb2.GetProgressResponse(instance=instance, running_sequence=running, last_progress_ms=age_ms)


@pytest.mark.parametrize(
    ("answer", "stalled_s", "limit_s", "lost"),
    [
        (progress(4), 5.0, 5.0, False),
        (progress(4), 5.001, 5.0, True),
        (progress(4), 1e6, None, False),  # loading weights may take any time
        (progress(0), 1e6, 5.0, False),  # an idle worker makes no progress
        (progress(0, instance="another life"), 0.0, None, True),
    ],
)
def test_verdict(answer, stalled_s, limit_s, lost):
    assert (verdict(answer, "life", stalled_s, limit_s) is not None) == lost


def test_verdict_names_age_and_limit():
    assert verdict(progress(1), "life", 7.3, 5.0) == "no progress for 7.3 s, the limit is 5.0 s"


class Failed(grpc.RpcError):
    def __init__(self, code):
        self._code = code

    def code(self):
        return self._code


class Played:
    """A rank and the waits of the coordinator that polls it: how long each wait takes, and what the rank has said by its end.

    None = nothing. The pauses between polls are such waits too.
    """

    rank, instance = 3, "life"

    def __init__(self, *waits, configured=True):
        self.configured = rank_pb2.Configured() if configured else None
        self.lane = self
        self.waits = list(waits)
        self.asked: list[float] = []
        self.calls: list[asyncio.Future[rank_pb2.GetProgressResponse]] = []

    def stall_limit_s(self, sequence):
        return LIMIT_S if sequence else None

    async def progress(self, deadline_s):
        self.asked.append(deadline_s)
        self.calls.append(asyncio.get_running_loop().create_future())
        return await self.calls[-1]

    async def wait(self, future, seconds):
        took_s, said = self.waits.pop(0)
        await asyncio.sleep(0)  # the call begins
        if isinstance(said, Exception):
            self.calls[-1].set_exception(said)
        elif said is not None:
            self.calls[-1].set_result(said)
        if said is not None:
            await asyncio.wait({future})
        return waited(seconds, took_s)

    async def outcome(self):
        """Why it is fenced; None = it is not, when all is played."""
        try:
            reason = await watch(self, TIMINGS, self.wait)
        except IndexError:
            reason = None
        assert not self.waits
        await asyncio.sleep(0)
        assert all(call.done() for call in self.calls), "a poll goes on that nobody waits for"
        return reason


SILENT = (0.25, None)
PAUSE = (0.5, None)
WELL = (0.001, progress(0))


@pytest.mark.parametrize(
    ("waits", "reason"),
    [
        ([WELL, PAUSE, WELL], None),
        ([SILENT] * 7, None),
        ([SILENT] * 8, "no answer for 2 s"),
        ([SILENT] * 7 + [WELL, PAUSE] + [SILENT] * 7, None),  # each poll for itself
        # Three looks in eleven seconds: who comes so late has hardly looked.
        ([(3.75, None)] * 3 + [WELL], None),
        ([(3.75, None)] * 3 + [SILENT] * 5, "no answer for 2 s"),
        ([(0.5, None)] * 7 + [WELL], None),
        # 20 s are forgiven, and no more, however late the looks are.
        ([(20.25, None), (1.75, None)], "no answer for 2 s"),
        ([(20.25, None), (1.7, None)], None),
        ([(5.25, None)] * 5, "no answer for 2 s"),
        ([(3600.0, None)], "no answer for 2 s"),
        ([(3600.0, progress(0))], None),  # it had answered all the time
        ([(0.1, Failed(grpc.StatusCode.UNAVAILABLE))], "it does not answer (UNAVAILABLE)"),
        ([(0.1, Failed(grpc.StatusCode.DEADLINE_EXCEEDED))], "no answer for 2 s"),
    ],
)
async def test_silence_counts_while_the_coordinator_looks(waits, reason):
    rank = Played(*waits)
    assert await rank.outcome() == reason
    assert set(rank.asked) == {TIMINGS.poll_deadline_s + TIMINGS.forgiven_s}


def stuck(age_s):
    return (0.0, progress(7, int(age_s * 1000)))


@pytest.mark.parametrize(
    ("waits", "reason"),
    [
        ([stuck(4.9), PAUSE, stuck(5.4)], "no progress for 5.4 s, the limit is 5.0 s"),
        # We slept through four seconds of it.
        ([stuck(4.4), (4.5, None), stuck(8.9), PAUSE, stuck(9.4)], "no progress for 5.4 s, the limit is 5.0 s"),
        ([stuck(4.4), (4.5, None), stuck(8.9)], None),
        ([stuck(4.0), PAUSE, (4.25, stuck(8.75)[1])], None),
        # Progress since: what was forgiven before is forgotten.
        (
            [stuck(4.4), (4.5, None), stuck(0.0)] + [wait for half in range(1, 12) for wait in (PAUSE, stuck(half / 2))],
            "no progress for 5.5 s, the limit is 5.0 s",
        ),
        # Twenty seconds are forgiven, and no more.
        ([stuck(1.0), (31.0, None), stuck(32.0)], "no progress for 12.0 s, the limit is 5.0 s"),
    ],
)
async def test_a_stall_counts_while_the_coordinator_is_not_held_up(waits, reason):
    assert await Played(*waits).outcome() == reason


@pytest.mark.parametrize(("configured", "looks"), [(False, 40), (True, 8)])
async def test_a_rank_that_reads_its_weights_may_answer_later(configured, looks):
    rank = Played(*[SILENT] * looks, configured=configured)
    assert await rank.outcome() == f"no answer for {looks // 4} s"


def test_connections_outlive_what_the_monitor_forgives():
    """An unanswered ping breaks the lane, whoever of the two is held up."""
    for server in (False, True):
        assert dict(options("prompt", server=server))["grpc.http2.ping_timeout_ms"] >= 1000 * Timings().forgiven_s
