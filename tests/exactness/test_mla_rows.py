"""Every row of latent attention over a sharded cache, every slot it leaves behind, and what travels for it."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cp_layout.laws import legal_shapes
from cp_layout.model_shape import MlaShape
from cp_wire.pb import common_pb2, rank_pb2
from rank_server.attention import latent_shard
from rank_server.flows.gather_kv import GatherKvWay
from rank_server.sequences import PlanRefused
from tests.exactness.latent_flows import LatentFlowCluster
from tests.exactness.test_pcp_rows import CHUNKS, B, grid, run

EXPANDS = MlaShape(None, kv_lora_rank=24, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2)
"""Keys of three queries or more are expanded; values are narrower than latents."""
WIDE = MlaShape(None, kv_lora_rank=4, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=6)
"""Always absorbed; values are wider than latents."""
MODELS = {"narrow values": EXPANDS, "wide values": WIDE}
SHARDED = [shape for shape in legal_shapes(8, 8, 1, mla=True) if shape[2] > 1]
SOME = [(2, 1, 2), (1, 2, 2), (1, 3, 3), (2, 2, 4), (4, 2, 4)]
ROW_BYTES = EXPANDS.latent_dim * 4


def flows(shape: tuple[int, int, int], mla: MlaShape = EXPANDS, **settings) -> LatentFlowCluster:
    tp, pcp, dcp = shape
    return LatentFlowCluster(grid(pcp, dcp, tp, **settings), mla, heads=2 * tp if tp > 2 else 4)


def models_in_turn(first: int) -> list[tuple]:
    """Every shape with either gather; the two models alternate along both."""
    cases = itertools.product(enumerate(SOME), enumerate(("q", "kv")))
    return [(shape, gather, list(MODELS)[(row + column + first) % 2]) for (row, shape), (column, gather) in cases]


@pytest.mark.parametrize(("shape", "gather", "model"), models_in_turn(0), ids=str)
def test_d1_every_context_and_chunk_in_one_batch(shape, gather, model):
    """Contexts of 0 to 9 and 1 to 9 new tokens: 90 requests side by side."""
    run(flows(shape, MODELS[model]), CHUNKS, gather)


@pytest.mark.sweep
@pytest.mark.parametrize(("shape", "gather", "model"), models_in_turn(1), ids=str)
def test_d1_every_context_and_chunk_in_one_batch_with_the_other_model(shape, gather, model):
    run(flows(shape, MODELS[model]), CHUNKS, gather)


@pytest.mark.parametrize("pcp", [2, 3, 4])
def test_d1_every_context_and_chunk_of_a_cache_that_is_not_sharded(pcp):
    run(flows((1, pcp, 1)), CHUNKS, "kv")


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2), (1, 3, 3), (1, 4, 4), (2, 2, 4)], ids=str)
def test_d1_every_context_and_chunk_alone(shape, chunk):
    for gather, interleave, model in itertools.product(("q", "kv"), (1, B), MODELS.values()):
        run(flows(shape, model, interleave=interleave), [chunk], gather)


@pytest.mark.sweep
@pytest.mark.parametrize("merge", ["a2a", "ag_rs"])
@pytest.mark.parametrize("interleave", [1, 2, B])
@pytest.mark.parametrize("gather", ["q", "kv", "kv_all"])
@pytest.mark.parametrize("shape", SHARDED, ids=str)
def test_d9_every_legal_shape(shape, gather, interleave, merge):
    cluster = flows(shape, interleave=interleave, merge=merge)
    chunks = [(0, 1), (0, 17), (3, 9), (9, 1), (13, 2 * shape[1])]
    if gather == "kv_all":
        _keys_come_to_all_rows(cluster, chunks)
    else:
        run(cluster, chunks, gather)


@pytest.mark.parametrize("workspace_rows", [2, 1 << 10])
@pytest.mark.parametrize("shape", SOME, ids=str)
def test_latents_may_come_to_decode_rows_too(shape, workspace_rows):
    cluster = flows(shape, interleave=1, workspace_bytes=workspace_rows * shape[2] * ROW_BYTES)
    _keys_come_to_all_rows(cluster, [(0, 1), (0, 17), (3, 9), (9, 1)])


def _keys_come_to_all_rows(cluster: LatentFlowCluster, chunks: list[tuple[int, int]]) -> None:
    """As `run`, and one step in which some decode while others prefill."""
    handles = [cluster.add(before + new + 3) for before, new in chunks]
    prefill = [before + new for before, new in chunks]
    cluster.step({handle: before for handle, (before, _) in zip(handles, chunks, strict=True) if before}, "kv_all", prefill)
    early = handles[: len(handles) // 2]
    cluster.step({handle: chunks[handle][1] for handle in early}, "kv_all", prefill)
    cluster.step({handle: 1 if handle in early else chunks[handle][1] for handle in handles}, "kv_all", prefill)
    cluster.check_caches()
    for _ in range(2):
        cluster.step(dict.fromkeys(handles, 1), "kv_all")
        cluster.check_caches()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("interleave", [1, B])
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2), (1, 3, 3), (2, 2, 4)], ids=str)
def test_c1_contexts_around_whole_workspaces(shape, interleave, dtype):
    """A workspace holds 2 runs of each shard; contexts of 1, 2, 3 workspaces ± 1, alone and together."""
    rows = 2 * interleave * shape[2]
    workspace = rows * EXPANDS.latent_dim * {"float32": 4, "float16": 2}[dtype]
    lengths = [workspaces * rows + more for workspaces in (1, 2, 3) for more in (-1, 0, 1)]
    for together in (lengths, [2 * rows + 1], [3 * rows]):
        cluster = flows(shape, interleave=interleave, workspace_bytes=workspace, kv_dtype=dtype)
        run(cluster, [(length, 2 * shape[1] + 1) for length in together], "kv")


@pytest.mark.parametrize(
    ("workspace_rows", "rounds"), [(7, 4), (8, 4), (9, 4), (15, 4), (16, 2), (17, 2), (24, 2), (31, 2), (32, 1), (33, 1)]
)
def test_c1_workspaces_around_whole_contexts(workspace_rows, rounds):
    """A context of 32 tokens over two shards in runs of 4; at least one run of each is brought."""
    cluster = flows((1, 2, 2), interleave=B, workspace_bytes=workspace_rows * ROW_BYTES)
    handle = cluster.add(37)
    cluster.step({handle: 32}, "kv", [37])
    before = cluster.ranks[0].calls()
    cluster.step({handle: 5}, "kv")
    assert cluster.ranks[0].calls() - before == 1 + rounds


def test_c3_a_gather_brings_what_was_computed_and_not_what_is_scheduled():
    """6 tokens computed, 3 scheduled, two shards: 3 rows of each."""
    cluster = flows((2, 1, 2), interleave=1)
    handle = cluster.add(9)
    cluster.step({handle: 6}, "kv", [9])
    with brought(cluster, "dcp", "all_gather") as sizes:
        cluster.step({handle: 3}, "kv")
    assert sizes == [3 * ROW_BYTES] * 2


@pytest.mark.parametrize("merge", ["a2a", "ag_rs"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("shape", "one_set_of_heads"), [((1, 2, 2), True), ((2, 2, 4), False), ((2, 1, 2), False)], ids=str)
def test_partials_travel_as_values_where_these_are_narrower(shape, one_set_of_heads, model, merge):
    """Where members have different heads nobody else can project them."""
    mla = MODELS[model]
    cluster = flows(shape, mla, merge=merge)
    handle = cluster.add(9)
    cluster.step({handle: 8}, "q", [8])
    with brought(cluster, "dcp", "all_to_all" if merge == "a2a" else "reduce_scatter") as sizes:
        cluster.step({handle: 1}, "none")
    width = min(mla.v_head_dim, mla.kv_lora_rank) if one_set_of_heads else mla.kv_lora_rank
    heads, members = cluster.model.num_heads // shape[0], shape[2]
    assert set(sizes) == {members * heads * (width + (merge == "a2a")) * 4}


@contextmanager
def brought(cluster: LatentFlowCluster, kind: str, operation: str) -> Iterator[list[int]]:
    """Bytes that each call of each rank hands in."""
    sizes: list[int] = []
    groups = [rank.group(kind) for rank in cluster.ranks]

    def watched(plain):
        def call(x: Tensor) -> Tensor:
            sizes.append(x.nbytes)
            return plain(x)

        return call

    for group in groups:
        setattr(group, operation, watched(getattr(group, operation)))
    yield sizes
    for group in groups:
        delattr(group, operation)


@pytest.mark.parametrize(("gather", "used"), [("q", {"absorbed"}), ("kv", {"expanded"})])
@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 2, 4), (2, 1, 2)], ids=str)
def test_chunks_are_expanded_where_latents_come_and_absorbed_where_queries_go(monkeypatch, shape, gather, used):
    """And decode rows are absorbed in any case."""
    seen = set()

    def watched(name, plain):
        def call(*args):
            seen.add(name)
            return plain(*args)

        return call

    for function in ("absorbed_paged", "absorbed_dense", "expanded"):
        monkeypatch.setattr(latent_shard, function, watched(function.split("_")[0], getattr(latent_shard, function)))
    cluster = flows(shape)
    handle = cluster.add(34)
    for count in (16, 16):
        cluster.step({handle: count}, gather, [32])
    assert seen == used
    seen.clear()
    cluster.step({handle: 1}, "none")
    assert seen == {"absorbed"}


@pytest.mark.parametrize(("dtype", "kv_dtype", "tolerance"), [("float32", "float16", 5e-6), ("bfloat16", "float16", 4e-2)])
@pytest.mark.parametrize("gather", ["q", "kv"])
@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 2, 4)], ids=str)
def test_c4_latents_are_rounded_as_in_the_cache(shape, dtype, kv_dtype, tolerance, gather):
    tp, pcp, dcp = shape
    cluster = LatentFlowCluster(grid(pcp, dcp, tp, dtype=dtype, kv_dtype=kv_dtype), EXPANDS, tolerance=tolerance)
    run(cluster, [(0, 9), (7, 5), (3, 1)], gather)


@pytest.mark.parametrize("gather", ["q", "kv"])
@pytest.mark.parametrize("shape", [(1, 4, 4), (2, 2, 4)], ids=str)
def test_b1_empty_shards_fill_one_by_one(shape, gather):
    """One token, then decode rows across the edges where further shards get their first one."""
    for interleave in (1, B):
        cluster = flows(shape, interleave=interleave)
        handle = cluster.add(3 * interleave + 3)
        cluster.step({handle: 1}, gather, [1])
        for _ in range(3 * interleave + 2):
            cluster.step({handle: 1}, "none")
        cluster.check_caches()


@pytest.mark.parametrize("gather", ["kv", "kv_all"])
def test_c6_what_a_gather_has_alive_does_not_depend_on_the_context(monkeypatch, gather):
    """Bytes of all tensors that a layer makes and still holds, at most, beside what it was given."""
    plain, peaks = GatherKvWay.complete, []

    def complete(self, layer, q, kv):
        with Alive() as alive:
            out = plain(self, layer, q, kv)
        peaks.append(alive.peak)
        return out

    monkeypatch.setattr(GatherKvWay, "complete", complete)
    most, workspace, new = [], 64 * ROW_BYTES, {"kv": 4, "kv_all": 1}[gather]
    for context in (32, 192, 256, 1024):
        cluster = flows((1, 2, 2), workspace_bytes=workspace)
        handle = cluster.add(context + new)
        cluster.step({handle: context}, gather, [context if gather == "kv_all" else context + new])
        peaks.clear()
        cluster.step({handle: new}, gather)
        most.append(max(peaks))
    assert most[0] < most[1] == most[2] == most[3]
    assert most[3] < 6 * workspace, most


class Alive(TorchDispatchMode):
    """Bytes of the storages that operations of this thread have made and that still exist: the most at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self._made = [(ref, size) for ref, size in self._made if not ref.expired()]
        if not func.is_view:
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, Tensor):
                    self._made.append((StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._made))
        return out


def test_replicas_do_not_split_a_pass():
    (rank, _) = flows((1, 2, 2)).ranks
    plan = rank_pb2.StepPlan(decode_mode=common_pb2.DECODE_MODE_SPLIT)
    with pytest.raises(PlanRefused, match="can't split passes of a model with latent attention"):
        rank.ways.of(plan, (), rank.sequences)
