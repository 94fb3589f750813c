"""How a sum over the members of a group travels, and what each of them receives of it."""

SCATTERED_SUM_BYTES = 256 * 1024
"""From this size on, and with more than two members, an all-reduce sums one chunk per member and gathers the sums: it moves
2(N−1)/N of the tensor instead of N−1 times the tensor, for one round more."""


def scattered(members: int, size: float) -> bool:
    """Whether a tensor of so many bytes is summed chunk by chunk."""
    return members > 2 and size >= SCATTERED_SUM_BYTES


def received(members: int, size: float) -> float:
    """Bytes that each member receives while a tensor of so many is summed."""
    return (2 / members if scattered(members, size) else 1) * (members - 1) * size
