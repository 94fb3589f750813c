"""How many prompt scores one step may bring: a rank's answer has to fit into one message of its lane."""

from coordinator.request import Request

MAX_SCORED_VALUES_IN_STEP = 1 << 20
"""Scored prompt positions × (1 + alternatives) of a step: at most 14 MB of the 32 MiB that a lane carries (a value takes up to
13 bytes), and one position of every further request that runs.
"""


class ScoreRoom:
    """What is left of the bound while a step is put together."""

    def __init__(self, values: int) -> None:
        self._left = values

    def take(self, request: Request, count: int) -> int:
        """How many of the next `count` ≥ 1 tokens may run: as many as their scores have room for, and never none."""
        if not request.is_unscored:
            return count
        width = 1 + (request.sampling.prompt_logprobs or 0)
        skipped = max(request.num_scored - 1 - request.num_computed, 0)  # scored before a preemption
        scoring = len(request.prompt) - 1 - request.num_computed - skipped
        fit = max(self._left // width, 0 if skipped else 1)
        if fit < scoring:
            count = min(count, skipped + fit)
        self._left -= width * max(min(count - skipped, scoring), 0)
        return count
