"""How tensor parallelism cuts a dimension into contiguous, near-equal parts."""


def cut(size: int, parts: int, index: int) -> tuple[int, int]:
    """Half-open range [⌊iF/T⌋, ⌊(i+1)F/T⌋) of part i of T of a dimension of size F."""
    return index * size // parts, (index + 1) * size // parts


def kv_head_cut(kv_heads: int, tp: int, index: int) -> tuple[int, int]:
    """KV heads that TP member i holds: its share when TP ≤ KVH, one replicated head when TP > KVH."""
    if tp <= kv_heads:
        return cut(kv_heads, tp, index)
    head = index * kv_heads // tp
    return head, head + 1
