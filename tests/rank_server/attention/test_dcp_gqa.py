import itertools
import math

import pytest
import torch

from cp_layout.errors import LayoutError
from cp_layout.grid import Grid
from cp_layout.laws import check_config
from rank_server.attention.dcp_gqa import DcpAttention
from rank_server.collectives.base import Group
from rank_server.collectives.solo import SoloGroup
from rank_server.kv_pool import KvPool
from tests.rank_server.attention.cluster import HEAD_DIM, SCALE, Chunk, Setup, check, make_ranks, make_requests
from tests.rank_server.threads import run_ranks

WORLD = 8
MERGES = ("a2a", "ag_rs")


def edge_lengths(block_size: int, shards: int) -> tuple[int, ...]:
    virtual = block_size * shards
    edges = {1, 2, 3, block_size - 1, block_size, block_size + 1, virtual - 1, virtual, virtual + 1}
    return tuple(sorted(edges - {0}))


def setup(tp: int, pcp: int, dcp: int, kv_heads: int, interleave: int, block_size: int, merge: str, **more: object) -> Setup:
    heads = math.lcm(tp, kv_heads) * 2
    lengths = more.pop("lengths", edge_lengths(block_size, dcp))
    return Setup(Grid(tp, pcp, dcp), heads, kv_heads, interleave, block_size, merge, lengths, **more)  # type: ignore[arg-type]


def legal_setups() -> list[Setup]:
    found = []
    sizes = range(1, WORLD + 1)
    for tp, pcp, dcp, kv_heads in itertools.product(sizes, sizes, sizes, (1, 2, 4)):
        if tp * pcp > WORLD:
            continue
        for interleave, block_size, merge in itertools.product((1, 2, 4), (4,), MERGES):
            try:
                made = setup(tp, pcp, dcp, kv_heads, interleave, block_size, merge)
                check_config(made.grid, made.layout, made.heads, kv_heads)
            except LayoutError:
                continue
            if dcp > 1 or (interleave, merge) == (1, "a2a"):
                found.append(made)
    return found


LEGAL = legal_setups()


def test_the_sweep_covers_the_interesting_grids() -> None:
    shapes = {(s.grid.tp, s.grid.pcp, s.grid.dcp, s.kv_heads) for s in LEGAL}
    assert shapes >= {
        (4, 1, 2, 2),
        (2, 2, 2, 2),
        (2, 2, 4, 1),
        (4, 2, 4, 2),
        (4, 2, 8, 1),
        (6, 1, 3, 2),
        (8, 1, 8, 1),
        (1, 8, 8, 4),
    }
    assert not shapes & {(4, 1, 4, 2), (3, 2, 6, 3), (6, 1, 2, 2), (4, 2, 8, 2)}


@pytest.mark.parametrize("made", LEGAL[::5], ids=str)
def test_every_query_of_every_rank_equals_dense_attention(made: Setup) -> None:
    check(made)


@pytest.mark.sweep
@pytest.mark.parametrize("made", LEGAL, ids=str)
def test_every_legal_grid_equals_dense_attention(made: Setup) -> None:
    check(made)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize(("block_size", "interleave"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (16, 1), (16, 4), (16, 16)])
def test_j3_block_sizes_and_interleaves(block_size: int, interleave: int, merge: str) -> None:
    check(setup(2, 2, 4, 1, interleave, block_size, merge))


@pytest.mark.parametrize("merge", MERGES)
def test_b1_shards_that_stay_empty_until_the_context_reaches_them(merge: str) -> None:
    # With I = B = 16 the shards 1, 2, 3 get their first token at lengths 17, 33, 49.
    check(setup(1, 4, 4, 2, 16, 16, merge, lengths=(1, 2, 3, 5, 14, 15, 16, 30, 31, 32, 47, 48, 100)))


def test_b7_queries_in_the_middle_of_an_interleaved_chunk() -> None:
    for interleave in (1, 2):
        check(setup(2, 1, 2, 1, interleave, 4, "a2a", lengths=(9,)))


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("shape", [(2, 1, 2, 1), (4, 2, 4, 2), (4, 1, 4, 1)], ids=str)
def test_c9_replicated_queries_give_the_same_heads(shape: tuple[int, int, int, int], merge: str) -> None:
    check(setup(*shape, 4, 4, merge, q_replicate=True))


@pytest.mark.parametrize("merge", MERGES)
def test_low_precision_tensors_keep_their_dtype_and_merge_in_fp32(merge: str) -> None:
    # One rounding of the result to bf16 is all that may be lost: values stay below 4, half an ulp is 2^-7.
    check(setup(2, 2, 4, 1, 1, 4, merge, dtype=torch.bfloat16), tolerance=2.0**-7)


@pytest.mark.parametrize("merge", MERGES)
def test_d12_ranks_that_own_nothing_take_part(merge: str) -> None:
    made = setup(1, 4, 4, 1, 4, 4, merge, lengths=(1,))
    (request,), num_blocks = make_requests(made)
    ranks = make_ranks(made, num_blocks)
    steps = [[Chunk(request, 0, 1)]] * 100
    run_ranks(4, lambda rank: [ranks[rank].forward(step) for step in steps], deadline_s=10.0)
    per_step = {"a2a": 1, "ag_rs": 2}[merge]
    assert [rank.groups[1].calls for rank in ranks] == [100 * per_step] * 4


@pytest.mark.parametrize(
    ("shape", "q_calls", "dcp_calls"),
    [
        ((1, 1, 1, 1), 0, 0),
        ((2, 1, 1, 1), 0, 0),
        ((1, 2, 1, 1), 0, 0),
        ((1, 2, 2, 1), 0, 1),
        ((2, 1, 2, 1), 1, 1),
        ((2, 2, 4, 1), 1, 1),
    ],
)
def test_i1_collectives_per_step_depend_on_the_grid_alone(
    shape: tuple[int, int, int, int], q_calls: int, dcp_calls: int
) -> None:
    made = setup(*shape, 4, 4, "a2a", lengths=(3,))
    (request,), num_blocks = make_requests(made)
    ranks = make_ranks(made, num_blocks)
    run_ranks(len(ranks), lambda rank: ranks[rank].forward([Chunk(request, 0, 3)]))
    assert {(rank.groups[0].calls, rank.groups[1].calls) for rank in ranks} == {(q_calls, dcp_calls)}


class FakePlace(SoloGroup):
    """Says that it has another size and index; nothing is ever called on it."""

    def __init__(self, size: int, index: int) -> None:
        super().__init__("g")
        self.size, self.index = size, index


@pytest.mark.parametrize(
    ("q_group", "dcp_group", "pcp"),
    [
        (FakePlace(1, 0), FakePlace(2, 0), 1),
        (FakePlace(2, 0), FakePlace(2, 0), 2),
        (FakePlace(2, 0), FakePlace(1, 0), 1),
        (FakePlace(2, 0), FakePlace(4, 1), 1),
        (FakePlace(2, 0), FakePlace(4, 2), 2),
        (FakePlace(2, 1), FakePlace(4, 1), 2),
    ],
)
def test_d9_groups_that_do_not_fit_are_refused(q_group: Group, dcp_group: Group, pcp: int) -> None:
    with pytest.raises(ValueError, match=r"does not fit"):
        DcpAttention(one_block(), q_group, dcp_group, "a2a", SCALE, pcp)


def test_replicated_queries_without_a_query_group_are_refused_naming_d() -> None:
    with pytest.raises(ValueError, match="d = 1"):
        DcpAttention(one_block(), SoloGroup("q"), SoloGroup("dcp"), "a2a", SCALE, 1, q_replicate=True)


def test_an_unknown_merge_is_refused() -> None:
    with pytest.raises(ValueError, match="merge 'ring' is not one of a2a, ag_rs"):
        DcpAttention(one_block(), SoloGroup("q"), SoloGroup("dcp"), "ring", SCALE, 1)


def one_block() -> KvPool:
    return KvPool(1, 1, 1, 1, HEAD_DIM, torch.float32, "cpu")
