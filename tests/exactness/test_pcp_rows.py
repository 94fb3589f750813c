"""Every row of attention that is dealt out over replicas, and every slot it leaves behind, against dense float64."""

import itertools
from collections import defaultdict
from collections.abc import Sequence

import pytest

from rank_server.attention import group_merge
from rank_server.collectives import shm_group
from rank_server.collectives.base import Backend
from rank_server.collectives.shm import ShmBackend
from rank_server.kv_pool import KvPool
from rank_server.sequences import PlanRefused
from tests.exactness.flows import HEAD_DIM, FlowCluster
from tests.inproc import Shape

B = 4
CHUNKS = list(itertools.product(range(10), range(1, 10)))
"""(tokens computed by an earlier step, new tokens)."""
WAYS = [(pcp, dcp, gather) for pcp in (2, 3, 4) for dcp in (1, pcp) for gather in ("q", "kv") if dcp > 1 or gather == "kv"]


def grid(pcp: int, dcp: int, tp: int = 1, **settings) -> Shape:
    return Shape(tp=tp, pcp=pcp, dcp=dcp, **{"interleave": 2, "block_size": B} | settings)


def run(cluster: FlowCluster, chunks: list[tuple[int, int]], gather: str) -> None:
    """Contexts, new tokens, then two decode rows each; the caches are checked after every step."""
    handles = [cluster.add(before + new + 2) for before, new in chunks]
    prefill = [before + new for before, new in chunks]
    dcp1 = cluster.shape.dcp == 1
    for counts in (
        {handle: before for handle, (before, _) in zip(handles, chunks, strict=True) if before},
        {handle: new for handle, (_, new) in zip(handles, chunks, strict=True)},
    ):
        if counts:
            cluster.step(counts, gather, prefill)
            cluster.check_caches()
    for _ in range(2):
        cluster.step(dict.fromkeys(handles, 1), "none")
        cluster.check_caches(only_owner=prefill if dcp1 else ())


@pytest.mark.parametrize(("pcp", "dcp", "gather"), WAYS)
def test_d1_every_context_and_chunk_in_one_batch(pcp, dcp, gather):
    run(FlowCluster(grid(pcp, dcp)), CHUNKS, gather)


@pytest.mark.parametrize(("pcp", "dcp", "gather"), WAYS)
def test_d1_context_1_and_3_new_tokens_alone(pcp, dcp, gather):
    run(FlowCluster(grid(pcp, dcp)), [(1, 3)], gather)


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
@pytest.mark.parametrize(("pcp", "dcp", "gather"), WAYS)
def test_d1_every_context_and_chunk_alone(pcp, dcp, gather, chunk):
    for interleave in (1, B):
        run(FlowCluster(grid(pcp, dcp, interleave=interleave)), [chunk], gather)


@pytest.mark.parametrize("merge", ["a2a", "ag_rs"])
@pytest.mark.parametrize("gather", ["q", "kv"])
@pytest.mark.parametrize(
    ("shape", "heads", "kv_heads"),
    [((2, 2, 2), 4, 2), ((2, 2, 4), 4, 1), ((4, 2, 4), 8, 2), ((4, 2, 8), 8, 1), ((2, 3, 6), 4, 1), ((3, 2, 2), 6, 3)],
    ids=str,
)
def test_d9_with_tensor_parallel_heads(shape, heads, kv_heads, gather, merge):
    """tp ≠ pcp ≠ dcp: a group taken for another can't cancel out."""
    tp, pcp, dcp = shape
    cluster = FlowCluster(grid(pcp, dcp, tp, merge=merge), heads, kv_heads)
    run(cluster, [(0, 1), (0, 17), (3, 9), (9, 1), (13, 2 * pcp)], gather)


class ShmFlowCluster(FlowCluster):
    """Ranks whose groups share memory."""

    def backends(self, ranks: int) -> Sequence[Backend]:
        """See `FlowCluster`."""
        return [ShmBackend() for _ in range(ranks)]


@pytest.mark.parametrize(
    ("shape", "kv_heads"), [((1, 2, 2), 2), ((1, 3, 3), 2), ((2, 2, 2), 2), ((2, 2, 4), 1), ((2, 1, 2), 1)], ids=str
)
def test_partials_apart_are_merged_out_of_the_memory_of_others(shape, kv_heads, monkeypatch):
    """As large ones are; here all of them, so that exchange follows upon exchange."""
    monkeypatch.setattr(group_merge, "APART_BYTES", 0)
    monkeypatch.setattr(shm_group, "LENT_BYTES", 0)
    tp, pcp, dcp = shape
    cluster = ShmFlowCluster(grid(pcp, dcp, tp), kv_heads=kv_heads)
    run(cluster, [(0, 1), (0, 17), (3, 9), (9, 1), (13, 2 * pcp)], "q")


@pytest.mark.parametrize(
    ("shape", "gather"),
    [((1, 3, 3), "q"), ((1, 3, 3), "kv"), ((2, 2, 2), "q"), ((2, 2, 4), "q"), ((2, 2, 4), "kv"), ((1, 2, 1), "kv")],
    ids=str,
)
def test_a_rank_writes_no_slot_twice(shape, gather, monkeypatch):
    """Several members of a group may bring the same keys."""
    written, write = defaultdict(list), KvPool.write

    def noted(pool, layer, k, v, slots):
        written[id(pool)] += slots[slots >= 0].tolist()
        write(pool, layer, k, v, slots)

    monkeypatch.setattr(KvPool, "write", noted)
    tp, pcp, dcp = shape
    cluster = FlowCluster(grid(pcp, dcp, tp), kv_heads=max(1, tp * pcp // dcp))
    run(cluster, [(0, 1), (0, 17), (3, 9), (9, 1), (13, 2 * pcp)], gather)
    assert set(written) == {id(rank.pool) for rank in cluster.ranks}
    assert all(len(set(slots)) == len(slots) for slots in written.values())


@pytest.mark.parametrize("workspace_bytes", [1 << 20, 400])
@pytest.mark.parametrize("shape", [(1, 3, 3), (2, 2, 2), (2, 2, 4), (2, 1, 2), (4, 2, 4)], ids=str)
def test_keys_may_come_to_decode_rows_too(shape, workspace_bytes):
    """Alone, one by one, and beside prefill rows; also with contexts that take many gathers."""
    tp, pcp, dcp = shape
    cluster = FlowCluster(
        grid(pcp, dcp, tp, interleave=1, workspace_bytes=workspace_bytes), 2 * max(2, tp), max(1, tp * pcp // dcp)
    )
    handles = [cluster.add(40) for _ in range(4)]
    prefill = [1, 5, 30, 17]
    cluster.step(dict(zip(handles, (1, 5, 13, 17), strict=True)), "kv_all", prefill)
    cluster.step({handles[0]: 1, handles[2]: 17, handles[1]: 1, handles[3]: 1}, "kv_all", prefill)
    cluster.check_caches()
    for handle in handles:
        cluster.step({handle: 1}, "kv_all")
    for _ in range(3):
        cluster.step(dict.fromkeys(handles, 1), "kv_all")
        cluster.check_caches()


@pytest.mark.parametrize("gather", ["q", "kv"])
def test_decode_rows_beside_prefill_rows_with_and_without_context(gather):
    cluster = FlowCluster(grid(3, 3))
    handles = [cluster.add(40) for _ in range(6)]
    prefill = [4, 5, 30, 30, 6, 30]
    cluster.step({handles[0]: 4, handles[1]: 5, handles[4]: 6}, gather, prefill)
    cluster.step({handles[0]: 1, handles[2]: 13, handles[1]: 1, handles[4]: 1}, gather, prefill)
    cluster.step({handles[0]: 1, handles[2]: 17, handles[3]: 3, handles[4]: 1, handles[5]: 30}, gather, prefill)
    cluster.check_caches()
    cluster.step({handles[3]: 27, handles[2]: 1}, gather, prefill)
    cluster.check_caches()


@pytest.mark.parametrize("gather", ["q", "kv"])
@pytest.mark.parametrize("pcp", [2, 4])
def test_d12_all_decode_rows_may_have_one_owner(pcp, gather):
    """The other replicas have no row, and take part all the same."""
    cluster = FlowCluster(grid(pcp, pcp))
    handles = [cluster.add(20) for _ in range(3)]
    prefill = [1, 2, 2 * pcp - 1]
    for handle, count in zip(handles, prefill, strict=True):
        cluster.step({handle: count}, gather, prefill, owner=pcp - 1)
    for _ in range(3):
        cluster.step(dict.fromkeys(handles, 1), "none")
    cluster.check_caches()


@pytest.mark.parametrize("pcp", [2, 3])
@pytest.mark.parametrize("interleave", [1, B])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_c1_contexts_around_whole_workspaces(pcp, interleave, dtype):
    """A workspace holds 2 runs of each shard; contexts of 1, 2, 3 workspaces ± 1, alone and together."""
    itemsize, heads = {"float32": 4, "float16": 2}[dtype], 2
    rows = 2 * interleave * pcp
    shape = grid(pcp, pcp, interleave=interleave, workspace_bytes=rows * 2 * heads * HEAD_DIM * itemsize, kv_dtype=dtype)
    lengths = [workspaces * rows + more for workspaces in (1, 2, 3) for more in (-1, 0, 1)]
    for together in (lengths, [2 * rows + 1], [3 * rows]):
        run(FlowCluster(shape, kv_heads=heads), [(length, 2 * pcp + 1) for length in together], "kv")


def test_c6_gathers_are_bounded_by_the_workspace_not_by_the_context():
    """What one gather brings; a context four times as long takes four times as many."""
    for length, pieces in ((64, 2), (256, 8)):
        cluster = FlowCluster(grid(2, 2, workspace_bytes=32 * 2 * 2 * HEAD_DIM * 4))
        biggest = [0] * 2
        for index, rank in enumerate(cluster.ranks):
            _watch(rank, index, biggest)
        handle = cluster.add(length + 4)
        cluster.step({handle: length}, "kv", [length + 4])
        before = cluster.ranks[0].calls()
        biggest[:] = [0, 0]
        cluster.step({handle: 4}, "kv")
        assert cluster.ranks[0].calls() - before == 1 + pieces
        assert biggest == [16 * 2 * 2 * HEAD_DIM * 4] * 2, "half of the workspace from each member"


def _watch(rank, index: int, biggest: list[int]) -> None:
    group = rank.group("dcp")
    plain = group.all_gather

    def all_gather(x):
        biggest[index] = max(biggest[index], x.nbytes)
        return plain(x)

    group.all_gather = all_gather


@pytest.mark.parametrize(("dtype", "kv_dtype", "tolerance"), [("float32", "float16", 2e-6), ("bfloat16", "float16", 2e-2)])
@pytest.mark.parametrize("gather", ["q", "kv"])
def test_c4_keys_are_rounded_as_in_the_cache(dtype, kv_dtype, tolerance, gather):
    """The oracle reads keys of the cache's dtype; new tokens that never left this rank are no exception."""
    run(FlowCluster(grid(2, 2, dtype=dtype, kv_dtype=kv_dtype), tolerance=tolerance), [(0, 9), (7, 5), (3, 1)], gather)


def test_only_the_owner_has_decoded_tokens_where_the_cache_is_not_sharded():
    cluster = FlowCluster(grid(2, 1))
    handles = [cluster.add(12), cluster.add(12)]
    cluster.step({handles[0]: 5, handles[1]: 6}, "kv", [5, 6])
    before = [rank.calls() for rank in cluster.ranks]
    cluster.step(dict.fromkeys(handles, 1), "none")
    assert [rank.calls() for rank in cluster.ranks] == before, "decode rows need no collective"
    cluster.check_caches(only_owner=[5, 6])


def test_prefill_rows_in_a_step_that_gathers_nothing_are_refused():
    cluster = FlowCluster(grid(2, 2))
    with pytest.raises(PlanRefused, match="request 0 prefills in a step that gathers nothing"):
        cluster.step({cluster.add(4): 4}, "none", [4])


def test_an_owner_that_is_no_replica_is_refused():
    cluster = FlowCluster(grid(2, 2))
    with pytest.raises(PlanRefused, match="request 0: replica 2 of 2 owns it"):
        cluster.step({cluster.add(1): 1}, "none", [0], owner=2)


@pytest.mark.parametrize(("context", "gather"), [(5, "q"), (5, "kv"), (4000, "kv")])
def test_a_decode_step_costs_one_gather_and_one_way_back_whatever_the_context(context, gather):
    cluster = FlowCluster(grid(2, 2, workspace_bytes=1 << 14), blocks=1024)
    handles = [cluster.add(context + 1), cluster.add(9)]
    cluster.step({handles[0]: context, handles[1]: 8}, gather, [context, 8])
    before = cluster.ranks[0].calls()
    cluster.step(dict.fromkeys(handles, 1), "none")
    assert cluster.ranks[0].calls() - before == 2
