"""How tensor parallelism cuts a dimension into contiguous, near-equal parts."""

from cp_layout.errors import LayoutError


def cut(size: int, parts: int, index: int) -> tuple[int, int]:
    """Half-open range [⌊iF/T⌋, ⌊(i+1)F/T⌋) of part i of T of a dimension of size F; parts differ by at most one.

    `LayoutError` unless 0 ≤ i < T and F ≥ 0.
    """
    if not 0 <= index < parts or size < 0:
        raise LayoutError(f"part {index} of {parts} of a dimension of {size} does not exist (0 <= i < T, F >= 0)")
    return index * size // parts, (index + 1) * size // parts


def kv_head_cut(kv_heads: int, tp: int, index: int) -> tuple[int, int]:
    """KV heads [first, last) that TP member i holds: its share when TP ≤ KVH, one replicated head when TP > KVH.

    The law that TP and KVH divide one another (`cp_layout.laws`) makes these the heads that the member's Q heads attend.
    """
    first, last = cut(kv_heads, tp, index)
    return (first, last) if tp <= kv_heads else (first, first + 1)
