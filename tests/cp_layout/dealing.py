"""The slow truth the arithmetic is compared with: deal runs of I tokens to the shards, like cards."""

from cp_layout.interleave import Layout


def deal(layout: Layout, length: int) -> list[list[int]]:
    """Positions that each shard holds of [0, L), in the order in which it stores them."""
    hands: list[list[int]] = [[] for _ in range(layout.num_shards)]
    turn = 0
    for start in range(0, length, layout.interleave):
        hands[turn] += range(start, min(start + layout.interleave, length))
        turn = (turn + 1) % layout.num_shards
    return hands


def small_layouts() -> list[Layout]:
    """Every layout with N ≤ 5 and B ≤ 8 that keeps the laws, an interleave above B for N = 1 included."""
    many = [Layout(n, i, b) for n in range(2, 6) for b in range(1, 9) for i in range(1, b + 1) if b % i == 0]
    return many + [Layout(1, i, b) for b in range(1, 9) for i in range(1, 10)]
