"""What steps cost, how much of it is the coordinator's and the wire's, and in which ways they were computed."""

from collections import Counter, deque
from collections.abc import Sequence
from statistics import median

from coordinator.plan import DecodeMode, Gather, ScheduledStep
from cp_wire.pb import coordinator_pb2

WINDOW = 512


class StepMeter:
    """Medians over the last WINDOW steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._plan_bytes = 0
        self._wall_s: deque[float] = deque(maxlen=WINDOW)
        self._rank_s: deque[float] = deque(maxlen=WINDOW)
        self.ways: Counter[tuple[DecodeMode, Gather]] = Counter()
        """Steps with rows, by decode mode and gather."""

    def record(self, wall_s: float, rank_s: float, plan_bytes: int) -> None:
        """One step: from the begin of scheduling to the end of its commit, the slowest rank's own time, the plan's size."""
        self._steps += 1
        self._plan_bytes = plan_bytes
        self._wall_s.append(wall_s)
        self._rank_s.append(rank_s)

    def count(self, step: ScheduledStep) -> None:
        """A step was computed the way it says; one without rows computes nothing."""
        if step.rows:
            self.ways[step.decode_mode, step.gather] += 1

    @classmethod
    def merged(cls, meters: Sequence["StepMeter"], last_steps: int = 0) -> "StepMeter":
        """One meter over the last steps of several sets (0 = all remembered); the plan size is the largest."""
        whole = cls()
        whole._steps = sum(meter._steps for meter in meters)
        whole._plan_bytes = max((meter._plan_bytes for meter in meters), default=0)
        whole._wall_s = deque(wall for meter in meters for wall in list(meter._wall_s)[-last_steps:])
        whole._rank_s = deque(rank for meter in meters for rank in list(meter._rank_s)[-last_steps:])
        whole.ways = sum((meter.ways for meter in meters), Counter())
        return whole

    def report(self) -> coordinator_pb2.StepTimes:
        """All zeros before the first step."""
        if not self._steps:
            return coordinator_pb2.StepTimes()
        overhead = median(wall - rank for wall, rank in zip(self._wall_s, self._rank_s, strict=True))
        return coordinator_pb2.StepTimes(
            steps=self._steps,
            step_ms=1000 * median(self._wall_s),
            rank_ms=1000 * median(self._rank_s),
            overhead_ms=1000 * overhead,
            last_plan_bytes=self._plan_bytes,
        )
