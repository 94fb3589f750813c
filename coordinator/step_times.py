"""What steps cost, how much of it is the coordinator's and the wire's, and in which ways they were computed."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from statistics import median

from coordinator.plan import DecodeMode, Gather, ScheduledStep
from cp_wire.pb import coordinator_pb2

WINDOW = 512

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Of the histogram's buckets."""


class StepMeter:
    """Sums over all steps with rows, medians over the last WINDOW of them; a step without rows computes nothing."""

    def __init__(self) -> None:
        self._steps = self._plans = 0
        self._plan_bytes = 0
        self._wall_s: deque[float] = deque(maxlen=WINDOW)
        self._rank_s: deque[float] = deque(maxlen=WINDOW)
        self._totals_s = (0.0, 0.0, 0.0)
        """Of steps, of their slowest ranks, in collectives."""
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self.ways: Counter[tuple[DecodeMode, Gather]] = Counter()
        """Steps by decode mode and gather."""

    def record(self, step: ScheduledStep, wall_s: float, rank_s: float, collective_s: float, plan_bytes: int) -> None:
        """wall_s: from the begin of scheduling to the end of the commit; of a step that the ranks have taken by themselves,
        from the end of the commit before. rank_s, collective_s: see `Outcome`. plan_bytes: 0 for such a step.
        """
        if not step.rows:
            return
        self._steps += 1
        if plan_bytes:
            self._plans += 1
            self._plan_bytes = plan_bytes
        self._wall_s.append(wall_s)
        self._rank_s.append(rank_s)
        self._totals_s = _sums([self._totals_s, (wall_s, rank_s, collective_s)])
        self._buckets[bisect_left(BOUNDS_S, wall_s)] += 1
        self.ways[step.decode_mode, step.gather] += 1

    @classmethod
    def merged(cls, meters: Sequence["StepMeter"], last_steps: int = 0) -> "StepMeter":
        """One meter over several sets: medians over the last steps of each (0 = all remembered), the largest plan."""
        whole = cls()
        whole._steps = sum(meter._steps for meter in meters)
        whole._plans = sum(meter._plans for meter in meters)
        whole._plan_bytes = max((meter._plan_bytes for meter in meters), default=0)
        whole._wall_s = deque(wall for meter in meters for wall in list(meter._wall_s)[-last_steps:])
        whole._rank_s = deque(rank for meter in meters for rank in list(meter._rank_s)[-last_steps:])
        whole._totals_s = _sums([whole._totals_s, *(meter._totals_s for meter in meters)])
        whole._buckets = [sum(counts) for counts in zip(whole._buckets, *(meter._buckets for meter in meters), strict=True)]
        whole.ways = sum((meter.ways for meter in meters), Counter())
        return whole

    def report(self) -> coordinator_pb2.StepTimes:
        """All zeros before the first step, the histogram's bounds apart."""
        wall_s, rank_s, collective_s = self._totals_s
        times = coordinator_pb2.StepTimes(
            steps=self._steps,
            plans=self._plans,
            last_plan_bytes=self._plan_bytes,
            total_rank_s=rank_s,
            total_collective_s=collective_s,
            durations=coordinator_pb2.Histogram(bounds_s=BOUNDS_S, counts=self._buckets, sum_s=wall_s),
        )
        if self._steps:
            overhead = median(wall - rank for wall, rank in zip(self._wall_s, self._rank_s, strict=True))
            times.step_ms = 1000 * median(self._wall_s)
            times.rank_ms = 1000 * median(self._rank_s)
            times.overhead_ms = 1000 * overhead
        return times


def _sums(times: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    wall, rank, collective = map(sum, zip(*times, strict=True))
    return wall, rank, collective
