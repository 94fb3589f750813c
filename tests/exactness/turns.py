"""What takes turns over the cases of a product instead of doubling it."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable

MERGES = ("a2a", "ag_rs")


def merges_in_turn(cases: Iterable[tuple], group: Callable[[tuple], Hashable] = lambda case: None) -> list[tuple]:
    """Each case with a merge behind it: among cases of one group the two merges alternate."""
    seen: Counter[Hashable] = Counter()
    merged = []
    for case in cases:
        merged.append((*case, MERGES[seen[group(case)] % len(MERGES)]))
        seen[group(case)] += 1
    return merged
