"""How a rank becomes ready: what it refuses before it loads, what it says it took over, how large its pool is."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cp_layout.errors import LayoutError
from cp_layout.interleave import Layout
from cp_layout.model_shape import DTYPE_BYTES
from cp_wire.errors import ConfigRefused
from cp_wire.host_memory import PoolRefused
from cp_wire.identity import PROTOCOL_VERSION
from cp_wire.pb import common_pb2
from model_files import open_model
from rank_server import executor as executor_module
from rank_server.collectives.local import LocalHub
from rank_server.kv_pool import KvPool
from rank_server.place import DTYPES, NOT_OURS
from rank_server.sequences import PlanRefused
from tests.rank_server.ranks import BLOCKS, B, Rank, config, open_all, plan, row, serving
from tests.rank_server.threads import run_ranks


def full_config(files, **changes):
    """Every field that can be set is set, each to a value of its own."""
    stated = config(
        model_hash=files.hash,
        model_name="tiny",
        protocol_version=PROTOCOL_VERSION,
        max_model_len=99,
        max_num_seqs=5,
        max_num_batched_tokens=33,
        pcp_gather="kv",
        mla_gather="q",
    )
    for name, value in changes.items():
        setattr(stated, name, value)
    return stated


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tp": 4, "dcp": 2, "interleave": 2},
        {"pcp": 2, "dcp": 2, "dp": 2},
        {"merge": common_pb2.MERGE_AG_RS},
        {"dtype": "bfloat16", "kv_cache_dtype": "float16"},
    ],
    ids=str,
)
def test_f7_a_rank_states_the_configuration_that_it_took_over(files, changes):
    stated = full_config(files, **changes)
    assert Rank(files).executor.configure(stated, 0).config == stated


def test_f7_no_setting_escapes_the_statement(files):
    """A new field of the configuration has to be taken over, or named as none of a rank's business."""
    echo = Rank(files).executor.configure(full_config(files, kv_cache_memory_bytes=1 << 30), 0).config
    absent = {field.name for field in common_pb2.ClusterConfig.DESCRIPTOR.fields if not getattr(echo, field.name)}
    assert absent == {"q_replicate"}
    assert set(NOT_OURS) < {field.name for field in common_pb2.ClusterConfig.DESCRIPTOR.fields}


def test_j5_what_was_not_taken_over_differs(files, monkeypatch):
    def stubborn(files, tp, index, dtype, progress, device):
        return load(files, tp, index, torch.float32, progress, device)

    load = executor_module.load_weights
    monkeypatch.setattr(executor_module, "load_weights", stubborn)
    echo = Rank(files).executor.configure(full_config(files, dtype="bfloat16", model_hash="strange", protocol_version="0"), 0)
    assert (echo.config.dtype, echo.config.model_hash) == ("float32", files.hash)
    assert echo.config.protocol_version == PROTOCOL_VERSION


@pytest.mark.parametrize(
    ("changes", "rank", "kind", "said"),
    [
        ({"tp": 3}, 0, LayoutError, "8 Q heads cannot be cut over tp 3"),
        ({"tp": 4, "dcp": 4}, 0, LayoutError, "dcp 4 with tp 4"),
        ({"pcp": 2, "dcp": 2, "interleave": 3}, 0, LayoutError, "interleave size 3"),
        ({"tp": 2}, 2, ConfigRefused, "rank 2 does not exist in a world of 2 ranks"),
        ({"dtype": "float64"}, 0, ConfigRefused, "dtype 'float64' is not one of bfloat16, float32, float16"),
        ({"kv_cache_dtype": "int8"}, 0, ConfigRefused, "kv_cache_dtype 'int8'"),
        ({"merge": common_pb2.MERGE_UNSPECIFIED}, 0, ConfigRefused, "merge 0 is not one of a2a, ag_rs"),
        ({"q_replicate": True}, 0, ConfigRefused, "replicated query projections"),
        ({"collectives": "mpi"}, 0, ConfigRefused, "collectives 'mpi' is not one of local, public"),
        ({"collectives": "public", "tp": 2}, 0, ConfigRefused, r"not the wildcard '0\.0\.0\.0'"),
    ],
)
def test_j2_what_a_rank_cannot_do_is_refused_before_it_loads(files, changes, rank, kind, said):
    refusing = Rank(files)
    with pytest.raises(kind, match=said):
        refusing.executor.configure(config(**changes), rank)
    assert refusing.reports == 0
    assert refusing.executor.load_fraction == 0.0


def test_one_table_of_dtypes():
    assert list(DTYPES) == list(DTYPE_BYTES)
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == DTYPE_BYTES


def test_loading_reports_its_progress(files):
    rank = Rank(files)
    answer = rank.executor.configure(config(), 0)
    assert rank.executor.load_fraction == 1.0
    assert rank.reports >= len(files.tensors) / 2
    assert answer.weight_bytes > 0


def test_configured_twice_is_refused(files):
    rank = Rank(files).executor
    rank.configure(config(), 0)
    with pytest.raises(ConfigRefused, match="configured already"):
        rank.configure(config(), 0)


def test_a_grid_that_begins_with_a_later_rank(files):
    """Global ranks 3 and 4 of a set of their own: groups are named inside the grid, members are global ranks."""
    ranks, hub = {}, LocalHub()
    for rank in (3, 4):
        ranks[rank] = Rank(files, hub).executor
        ranks[rank].configure(config(tp=2), rank, first_rank=3)
        ranks[rank].allocate_pool(BLOCKS)
    assert [(each.place.index, each.place.tp_index, each.place.group_name("tp")) for each in ranks.values()] == [
        (0, 0, "tp:0"),
        (1, 1, "tp:0"),
    ]
    open_all(ranks, {"tp:0": [3, 4]})
    step = plan(row(1, 0, [5, 6, 7], [3]), admitted=[1])
    results = run_ranks(2, lambda i: ranks[3 + i].step(step))
    assert [len(result.sampled) for result in results] == [1, 0]
    for rank in (2, 5):
        with pytest.raises(ConfigRefused, match=f"rank {rank} does not exist in a world of 2 ranks from rank 3 on"):
            Rank(files).executor.configure(config(tp=2), rank, first_rank=3)


def test_a_pool_lies_where_others_read_it_if_they_will(files):
    for wanted in (False, True):
        executor = Rank(files).executor
        executor.configure(config(), 0, pool_is_shared=wanted)
        executor.allocate_pool(BLOCKS)
        assert (executor.shared_memory is not None) == wanted


def test_a7_a_restarted_rank_may_have_all_memory_that_is_left(files, monkeypatch):
    """Two ranks on a host, whose pools were settled when there was more: what the other one holds is not available any more."""
    pool_bytes = files.shape.kv_bytes_per_token(1, "float32") * B * BLOCKS
    monkeypatch.setattr(executor_module, "available_bytes", lambda: pool_bytes * 3 // 2)
    with pytest.raises(PoolRefused, match=f"needs {pool_bytes} bytes per rank"):
        Rank(files, ranks_on_host=2).executor.configure(config(), 0)
    assert Rank(files, ranks_on_host=2).executor.configure(config(), 0, pool_is_settled=True).max_kv_blocks == BLOCKS


# -- the pool


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (8, 2), (8, 4), (8, 8), (6, 3)])
def test_a4_a_block_takes_what_was_planned(tiny, monkeypatch, heads, kv_heads, dtype):
    """On every member of every legal TP, fewer and more than KV heads."""
    monkeypatch.setattr(executor_module, "load_weights", lambda *args: {})
    no_weights = SimpleNamespace(dtype=torch.float32, nbytes=0)
    monkeypatch.setattr(executor_module, "resident_weights", lambda shape, weights, num_parts: no_weights)
    files = open_model(tiny(heads=heads, kv_heads=kv_heads, hidden=8 * heads))
    for tp in (size for size in (1, 2, 3, 4, 6, 8) if heads % size == 0 and (size % kv_heads == 0 or kv_heads % size == 0)):
        planned = files.shape.kv_bytes_per_token(tp, dtype) * B
        for rank in range(tp):
            executor = Rank(files).executor
            answer = executor.configure(config(tp=tp, kv_cache_dtype=dtype), rank)
            assert executor.allocate_pool(3).bytes == 3 * planned
            assert executor.pool.bytes_per_block == planned == answer.kv_bytes_per_block
            assert executor.pool.dtype == DTYPES[dtype]


def test_a4_a_block_of_another_size_is_refused(files, monkeypatch):
    made = KvPool.of
    monkeypatch.setattr(KvPool, "of", lambda spec, *sizes: made(replace(spec, heads=spec.heads + 1), *sizes))
    rank = Rank(files).executor
    planned = rank.configure(config(), 0).kv_bytes_per_block
    with pytest.raises(PoolRefused, match=f"takes {planned * 3 // 2} bytes, {planned} were planned"):
        rank.allocate_pool(BLOCKS)
    with pytest.raises(PlanRefused, match="not allocated"):
        assert rank.pool


def test_a_second_pool_is_refused(files):
    executor = serving(files).executor
    pool = executor.pool
    with pytest.raises(PlanRefused, match="allocated already"):
        executor.allocate_pool(BLOCKS)
    assert executor.pool is pool


# -- order of commands


@pytest.mark.parametrize(
    "command",
    [
        lambda executor: executor.allocate_pool(BLOCKS),
        lambda executor: executor.prepare_group("tp:0", [0, 1]),
        lambda executor: executor.open_group("tp:0", [0, 1], b"", 1.0),
        lambda executor: executor.step(plan()),
    ],
    ids=["allocate", "prepare", "open", "step"],
)
def test_nothing_works_before_configure(files, command):
    with pytest.raises(PlanRefused, match="not configured"):
        command(Rank(files).executor)


def test_a_rank_alone_needs_no_collectives_and_has_no_groups(files):
    executor = serving(files, collectives="public").executor
    with pytest.raises(PlanRefused, match="alone in its set"):
        executor.prepare_group("tp:0", [0, 1])


def test_no_step_before_the_pool(files):
    rank = Rank(files).executor
    rank.configure(config(), 0)
    with pytest.raises(PlanRefused, match="not allocated"):
        rank.step(plan())


def test_no_step_before_the_groups(files):
    with pytest.raises(PlanRefused, match="group tp:0 of 2 ranks is not open"):
        serving(files, tp=2).executor.step(plan(row(1, 0, [5], [0]), admitted=[1]))


def test_a_place_follows_from_the_configuration(files):
    executor = Rank(files).executor
    executor.configure(config(tp=2, pcp=2, dcp=2, dp=2, interleave=2), 7)
    place = executor.place
    assert (place.member, place.tp_index, place.pcp_index) == (1, 1, 1)
    assert place.layout == Layout(num_shards=2, interleave=2, block_size=B)
    assert [place.group_name(kind) for kind in ("tp", "q", "dcp")] == ["tp:3", "q:7", "dcp:3"]


@pytest.mark.parametrize(
    ("place", "share"), [({}, 4), ({"tp": 2}, 4), ({"tp": 4}, 2), ({"tp": 4, "dcp": 2}, 4), ({"pcp": 2, "dcp": 2}, 4)], ids=str
)
def test_attention_is_compiled_before_there_are_requests(files, monkeypatch, place, share):
    """For the query heads that a KV head will meet: those of all ranks that gather their queries."""
    seen = []
    monkeypatch.setattr(
        executor_module, "kernels_for", lambda device: SimpleNamespace(warm_up=lambda *args: seen.append((device.type, *args)))
    )
    executor = Rank(files).executor
    executor.configure(config(kv_cache_dtype="bfloat16", **place), 0)
    executor.allocate_pool(BLOCKS)
    assert seen == [("cpu", torch.bfloat16, share, files.shape.head_dim, files.shape.head_dim)]
