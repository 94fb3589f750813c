"""When a rank that still has a lane counts as lost."""

from types import SimpleNamespace

import grpc
import pytest

from coordinator.monitor import verdict, watch
from coordinator.timings import Timings
from cp_wire.pb import rank_pb2


def progress(running: int, age_ms: int, instance: str = "life") -> rank_pb2.GetProgressResponse:
    return rank_pb2.GetProgressResponse(instance=instance, running_sequence=running, last_progress_ms=age_ms)


@pytest.mark.parametrize(
    ("answer", "limit_s", "lost"),
    [
        (progress(4, 5000), 5.0, False),
        (progress(4, 5001), 5.0, True),
        (progress(4, 10**9), None, False),  # loading weights may take any time
        (progress(0, 10**9), 5.0, False),  # an idle worker makes no progress
        (progress(0, 0, "another life"), None, True),
    ],
)
def test_verdict(answer, limit_s, lost):
    assert (verdict(answer, "life", limit_s) is not None) == lost


def test_verdict_names_age_and_limit():
    assert verdict(progress(1, 7300), "life", 5.0) == "no progress for 7.3 s, the limit is 5.0 s"


class TooLate(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(("configured", "said"), [(None, "no answer for 10 s"), (rank_pb2.Configured(), "no answer for 2 s")])
async def test_a_rank_that_reads_its_weights_may_answer_later(configured, said):
    async def progress(deadline_s):
        asked.append(deadline_s)
        raise TooLate

    asked: list[float] = []
    assert await watch(SimpleNamespace(configured=configured, progress=progress), Timings()) == said
    assert asked == [float(said.split()[3])]
