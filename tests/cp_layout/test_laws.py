import pytest

from cp_layout.cuts import kv_head_cut
from cp_layout.errors import LayoutError
from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.laws import check_config, check_heads, legal_dcp, legal_shapes

LEGAL = [
    (4, 1, 2, 2),
    (6, 1, 3, 2),
    (4, 2, 4, 2),
    (8, 2, 16, 1),
    (6, 1, 2, 3),
    (8, 1, 4, 2),
    (8, 1, 8, 1),
    (2, 2, 1, 4),
    (9, 1, 3, 3),
]
ILLEGAL = [(4, 1, 4, 2), (3, 2, 6, 3), (4, 2, 8, 2), (6, 1, 2, 2), (4, 1, 2, 4), (2, 1, 2, 4)]


def check(grid: Grid, num_heads: int, num_kv_heads: int, **options: bool | str) -> None:
    check_config(grid, Layout(grid.dcp, 16, 16), num_heads, num_kv_heads, **options)


@pytest.mark.parametrize(("tp", "pcp", "dcp", "kv_heads"), LEGAL)
def test_legal_examples(tp: int, pcp: int, dcp: int, kv_heads: int) -> None:
    check(Grid(tp, pcp, dcp), 4 * max(tp, kv_heads), kv_heads)


@pytest.mark.parametrize(("tp", "pcp", "dcp", "kv_heads"), ILLEGAL)
def test_a11_groups_that_mix_kv_heads_are_refused(tp: int, pcp: int, dcp: int, kv_heads: int) -> None:
    law = f"dcp {dcp} with tp {tp}, pcp {pcp} puts d = .* hold each of {kv_heads} KV heads: TP/KVH must be a multiple of d"
    with pytest.raises(LayoutError, match=law):
        check(Grid(tp, pcp, dcp), 4 * tp * kv_heads, kv_heads)


def test_refusal_offers_the_legal_sizes() -> None:
    with pytest.raises(LayoutError, match=r"TP/KVH = 6/2 = 3 ranks .* \(legal dcp here: 1, 3\)"):
        check(Grid(6, 1, 2), 12, 2)
    assert legal_dcp(4, 2, 2) == [1, 2, 4]
    assert legal_dcp(4, 2, 2, mla=True) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("grid", "num_heads", "kv_heads", "message"),
    [
        (Grid(tp=3), 8, 8, r"8 Q heads cannot be cut over tp 3: .* \(legal tp here: 1, 2, 4, 8\)"),
        (Grid(tp=3, dcp=3), 8, 1, "8 Q heads cannot be cut over tp 3"),
        (Grid(tp=16), 8, 2, "8 Q heads cannot be cut over tp 16"),
        (Grid(tp=4), 24, 6, r"tp 4 and 6 KV heads must divide one another .*; legal tp here: 1, 2, 3, 6, 12, 24\)"),
        (Grid(tp=6), 24, 4, "tp 6 and 4 KV heads must divide one another"),
        (Grid(), 8, 3, "8 Q heads do not share 3 KV heads evenly"),
        (Grid(), 0, 1, "at least one head of each kind, got 0 Q heads and 1 KV heads"),
        (Grid(), 4, 0, "at least one head of each kind, got 4 Q heads and 0 KV heads"),
    ],
)
def test_j2_head_counts_that_break_a_law_are_refused(grid: Grid, num_heads: int, kv_heads: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check(grid, num_heads, kv_heads)


def test_mla_needs_only_tp_mod_d() -> None:
    check(Grid(8, 2, 16), 16, 0, mla=True)
    check(Grid(4, 1, 4), 8, 2, mla=True)
    with pytest.raises(LayoutError, match="8 Q heads cannot be cut over tp 3"):
        check(Grid(3, 1, 3), 8, 0, mla=True)


def test_d11_shards_are_the_dcp_members() -> None:
    with pytest.raises(LayoutError, match="layout has 4 KV shards, but dcp is 2"):
        check_config(Grid(1, 2, 2), Layout(4, 1, 16), 4, 4)
    with pytest.raises(LayoutError, match="layout has 2 KV shards, but dcp is 1"):
        check_config(Grid(1, 2, 1), Layout(2, 1, 16), 4, 4)


def test_queries_are_gathered_only_to_where_keys_are_cut() -> None:
    for grid in (Grid(1, 2, 2), Grid(4, 2, 4), Grid(1, 1, 1), Grid(4, 1, 2)):
        for gather in ("auto", "q", "kv"):
            check(grid, 8, 2, pcp_gather=gather)
    for gather in ("auto", "kv"):
        check(Grid(2, 3, 1), 8, 2, pcp_gather=gather)
    with pytest.raises(LayoutError, match=r"pcp_gather q with pcp 3 needs dcp 3 or a multiple of it, got dcp 1"):
        check(Grid(2, 3, 1), 8, 2, pcp_gather="q")


def test_a_forced_gather_of_latents_needs_latents_and_agrees_with_that_over_replicas() -> None:
    for grid in (Grid(4, 2, 4), Grid(4, 1, 2), Grid(4, 1, 1)):
        for gather in ("auto", "q", "kv"):
            check(grid, 8, 1, mla=True, mla_gather=gather)
            check(grid, 8, 1, mla=True, mla_gather=gather, pcp_gather=gather)
    for gather in ("q", "kv"):
        with pytest.raises(LayoutError, match=f"--mla-gather {gather} is for latent attention, this model has 2 KV heads"):
            check(Grid(4, 2, 4), 8, 2, mla_gather=gather)
    with pytest.raises(LayoutError, match="--pcp-gather q and --mla-gather kv contradict one another"):
        check(Grid(4, 2, 4), 8, 1, mla=True, pcp_gather="q", mla_gather="kv")
    with pytest.raises(LayoutError, match="mla_gather q with pcp 2 needs dcp 2"):
        check(Grid(4, 2, 1), 8, 1, mla=True, mla_gather="q")
    with pytest.raises(LayoutError, match="mla_gather 'both' is not one of auto, q, kv"):
        check(Grid(4, 2, 4), 8, 1, mla=True, mla_gather="both")


def test_q_replicate_is_refused_where_it_saves_nothing() -> None:
    check(Grid(4, 1, 2), 8, 2, q_replicate=True)
    with pytest.raises(LayoutError, match="d = 1: dcp 2, pcp 2"):
        check(Grid(4, 2, 2), 8, 2, q_replicate=True)


def test_a_pool_holds_at_least_one_block() -> None:
    check_config(Grid(), Layout(1, 16, 16), 4, 4, kv_tokens_per_rank=16)
    with pytest.raises(LayoutError, match="KV pool of 15 tokens per rank holds no block of 16"):
        check_config(Grid(), Layout(1, 16, 16), 4, 4, kv_tokens_per_rank=15)


def groups_by_hand(tp: int, pcp: int, dcp: int) -> list[list[tuple[int, int]]]:
    """DCP groups as (pcp, tp) places, by walking the transposed grid; the last one may be short."""
    order = [(p, t) for t in range(tp) for p in range(pcp)]
    return [order[i : i + dcp] for i in range(0, len(order), dcp)]


def works(tp: int, pcp: int, dcp: int, kv_heads: int) -> bool:
    """What attention needs: whole groups; all replicas in each, or one rank; and one set of KV heads per group."""
    for group in groups_by_hand(tp, pcp, dcp):
        if len(group) != dcp:
            return False
        members = {t for _, t in group}
        if dcp > 1 and set(group) != {(p, t) for p in range(pcp) for t in members}:
            return False
        if len({kv_head_cut(kv_heads, tp, t) for t in members}) > 1:
            return False
    return True


@pytest.mark.parametrize("kv_heads", range(1, 9))
@pytest.mark.parametrize("tp", range(1, 13))
def test_a11_law_accepts_exactly_the_shapes_whose_groups_share_their_kv_heads(tp: int, kv_heads: int) -> None:
    divide = tp % kv_heads == 0 or kv_heads % tp == 0
    for pcp in range(1, 5):
        accepted, needed = [], []
        for dcp in range(1, tp * pcp + 2):
            if divide and works(tp, pcp, dcp, kv_heads):
                needed.append(dcp)
            try:
                check(Grid(tp, pcp, dcp), tp * kv_heads, kv_heads)
            except LayoutError:
                continue
            accepted.append(dcp)
        assert accepted == needed
        if divide:
            assert legal_dcp(tp, pcp, kv_heads) == needed


def test_a11_group_membership_follows_the_heads() -> None:
    assert [kv_head_cut(2, 4, rank)[0] for rank in range(4)] == [0, 0, 1, 1]
    assert Grid(4, 1, 2).dcp_groups() == [[0, 1], [2, 3]]
    with pytest.raises(LayoutError, match="dcp 2"):
        check_heads(Grid(4, 1, 2), 8, 4)


def test_legal_shapes_are_all_that_the_laws_accept() -> None:
    accepted = []
    for tp in range(1, 9):
        for pcp in range(1, 9):
            for dcp in range(1, 9):
                if tp * pcp > 8:
                    continue
                try:
                    check(Grid(tp, pcp, dcp), 8, 2)
                except LayoutError:
                    continue
                accepted.append((tp, pcp, dcp))
    assert list(legal_shapes(8, 8, 2)) == accepted
    assert (4, 2, 4) in accepted and (4, 1, 4) not in accepted and (3, 1, 1) not in accepted
    assert (4, 1, 4) in set(legal_shapes(8, 8, 0, mla=True))
