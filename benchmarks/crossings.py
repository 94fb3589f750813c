"""Where one of two ways becomes the cheaper one."""

from collections.abc import Sequence
from itertools import pairwise


def crossover(contexts: Sequence[int], q: Sequence[float], kv: Sequence[float]) -> float | None:
    """Context at which gathering queries becomes cheaper, between the two around it; None: nowhere up to the last one.

    contexts: ascending. q, kv: what either gather takes there, in one unit.
    """
    gaps = [a - b for a, b in zip(q, kv, strict=True)]
    if gaps[0] <= 0:
        return float(contexts[0])
    for (start, before), (stop, after) in pairwise(zip(contexts, gaps, strict=True)):
        if after <= 0 < before:
            return start + (stop - start) * before / (before - after)
    return None
