"""How calls on a shared-memory group are announced to the other members, and cut into rounds."""

from collections.abc import Sequence

OPERATIONS = ("barrier", "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "all_to_all_lent", "broadcast")
"""Their places are their codes; that of a broadcast is followed by those of broadcasts from the other members."""


def pieces(total: int, piece: int) -> Sequence[tuple[int, int]]:
    """[start, stop) of each piece; one empty piece for nothing, since members meet in every operation."""
    if total <= piece:
        return ((0, total),)
    return [(start, min(start + piece, total)) for start in range(0, total, piece)]


def call_of(code: int, total: int) -> str:
    """An announcement in words."""
    last = len(OPERATIONS) - 1
    name = OPERATIONS[code] if code < last else f"broadcast from {code - last}"
    return f"{name} of {total} bytes"
