"""Devices: where every tensor of a rank is made, and what is refused when a device is absent."""

import ast
from functools import partial
from pathlib import Path

import pytest
import torch

from cp_layout.interleave import Layout
from cp_wire.errors import ConfigRefused
from cp_wire.host_memory import PoolRefused
from cp_wire.pb import common_pb2, rank_pb2
from rank_server import device as device_module
from rank_server import executor as executor_module
from rank_server.attention.rows import attention_batch
from rank_server.collectives.solo import SoloGroup
from rank_server.device import POOL_SHARE, check_device, claim, gpus
from rank_server.kv_pool import KvPool
from rank_server.models.table import build_model, load_weights, resident_weights
from rank_server.sequences import SequenceTable
from rank_server.share import replicated
from rank_server.step_batch import build, hold, keep_history, take_in
from tests.rank_server.ranks import B, Rank, config, plan, row

META = torch.device("meta")
PACKAGE = Path(device_module.__file__).parent
MADE_FROM_NOTHING = {"tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "eye", "linspace", "as_tensor"}
HOST = {"sequences.py", "step_batch.py", "pool_store.py", "models/rotary.py", "collectives/local.py", "attention/paged_rows.py"}
"""Files that put something into host memory on purpose: block tables, token ids, frequencies, what a barrier stands on, copies
on their way to a device."""


def calls_of(path):
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_tensors_are_made_on_a_device_that_is_named(path):
    for call in calls_of(path):
        if ast.unparse(call.func.value) == "torch" and call.func.attr in MADE_FROM_NOTHING:
            where = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "device"]
            assert where, f"{path.name}:{call.lineno} names no device"
            assert where != ["'cpu'"] or str(path.relative_to(PACKAGE)) in HOST, f"{path.name}:{call.lineno} is in host memory"


def test_a_pass_stays_on_the_device_of_the_weights(files):
    """Tensors of another device would not meet those of `meta`, and a value read back from it raises."""
    shape = files.shape
    weights = load_weights(files, 1, 0, torch.float32, lambda done, total: None, META)
    model = build_model(shape, resident_weights(shape, weights, 1), SoloGroup("tp"))
    tokens = torch.zeros(3, dtype=torch.int64, device=META)
    hidden = model.forward(tokens, tokens, lambda layer, q, k, v: torch.empty_like(q))
    assert hidden.device.type == model.logits(hidden).device.type == "meta"


def test_weights_are_read_into_the_device(files):
    weights = load_weights(files, 1, 0, torch.bfloat16, lambda done, total: None, META)
    assert {x.device.type for x in weights.values()} == {"meta"}


def test_a_step_lies_on_the_device_and_its_block_tables_in_host_memory(files):
    table, layout = SequenceTable(), Layout(num_shards=1, interleave=B, block_size=B)
    sampling = common_pb2.SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    step = plan(row(1, 0, [5, 6, 7], [0]))
    step.admitted.append(rank_pb2.AdmittedRequest(handle=1, sampling=sampling, num_prompt_tokens=3))
    take_in(step, table, layout, 0, partial(keep_history, vocab_size=files.shape.vocab_size, device=META))
    rows = hold(step, table, layout, 0)
    share = replicated(rows, 1, 0)
    batch, attention = build(step, table, share, META), attention_batch(rows, share.spans, layout, META)
    tensors = (batch.token_ids, batch.positions, batch.sample_rows, attention.slots, attention.visible)
    assert {x.device.type for x in tensors} == {"meta"}
    assert attention.rows[0].block_table.device.type == "cpu"
    assert batch.draws[0].history.penalised(torch.empty(files.shape.vocab_size, device=META)).device.type == "meta"


def test_the_pool_lies_on_the_device():
    pool = KvPool(1, 2, 4, 1, 8, torch.float32, META)
    assert {x.device.type for x in pool.cache(0)} == {"meta"}


# -- absent devices


def test_torch_without_cuda_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpus() == (0, f"torch {torch.__version__} is built without CUDA")
    with pytest.raises(ConfigRefused, match=r"device cuda is absent: torch .* is built without CUDA"):
        check_device("cuda")


def test_a_gpu_that_torch_cannot_use_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigRefused, match=r"device cuda is absent: torch .* finds no usable GPU"):
        claim("cuda", 0)


def test_an_unknown_device_is_refused_by_name():
    with pytest.raises(ConfigRefused, match="device tpu is not one of cpu, cuda"):
        check_device("tpu")


@pytest.fixture
def two_gpus(monkeypatch):
    """What torch says about a host with two; nothing is computed on them."""
    current = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


def test_ranks_take_the_gpus_of_a_host_in_turn(two_gpus):
    assert [claim("cuda", rank).index for rank in (0, 1, 2, 7)] == [0, 1, 0, 1]
    assert [device.index for device in two_gpus] == [0, 1, 0, 1]
    assert claim("cpu", 1) == torch.device("cpu") and len(two_gpus) == 4


def out_of_memory(*args, **sizes):
    raise torch.OutOfMemoryError("CUDA out of memory, at great length")


def test_a4_what_a_gpu_has_no_room_for_is_named(files, two_gpus, monkeypatch):
    """A pool that fitted when its size was agreed on, and weights that never did."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 40))
    monkeypatch.setattr(executor_module, "load_weights", lambda *args: load_weights(*args[:-1], META))
    executor = Rank(files).executor
    block = executor.configure(config(device="cuda"), 0).kv_bytes_per_block
    monkeypatch.setattr(KvPool, "of", out_of_memory)
    with pytest.raises(PoolRefused, match=f"a KV pool of {3 * block} bytes can't be had on cuda:0, 1073741824 bytes are free"):
        executor.allocate_pool(3)
    monkeypatch.setattr(executor_module, "load_weights", out_of_memory)
    with pytest.raises(ConfigRefused, match="the weights can't be had on cuda:0"):
        Rank(files).executor.configure(config(device="cuda"), 0)


@pytest.mark.parametrize("device", ["cuda", ""])
def test_j2_a_cluster_on_a_device_that_a_rank_lacks_is_refused_before_it_loads(files, device):
    refusing = Rank(files)
    with pytest.raises(ConfigRefused, match=f"device {device} is"):
        refusing.executor.configure(config(device=device), 0)
    assert refusing.reports == 0


def test_j2_a_rank_that_insists_on_its_device_refuses_a_cluster_on_another(files, two_gpus):
    with pytest.raises(ConfigRefused, match="rank 0 computes on cpu, the cluster on cuda"):
        Rank(files, device="cpu").executor.configure(config(device="cuda"), 0)
    with pytest.raises(ConfigRefused, match="rank 0 computes on cuda, the cluster on cpu"):
        Rank(files, device="cuda").executor.configure(config(), 0)


def test_the_pool_of_a_gpu_is_bounded_by_what_is_free_there(files, two_gpus, monkeypatch):
    """The weights go nowhere: nothing here computes on a GPU."""
    seen = []
    monkeypatch.setattr(executor_module, "load_weights", lambda *args: seen.append(args[-1]) or load_weights(*args[:-1], META))
    monkeypatch.setattr(executor_module, "available_bytes", lambda: pytest.fail("host memory was asked"))
    block = files.shape.kv_bytes_per_token(2, "float32") * B
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200 * block if device.index == 1 else 0, 1 << 40))
    asked = config(device="cuda", kv_cache_tokens_per_rank=0, tp=2)
    answer = Rank(files, ranks_on_host=2).executor.configure(asked, 1)
    assert answer.config.device == "cuda"
    assert answer.max_kv_blocks == int(POOL_SHARE * 200 * block) // block
    assert seen == [torch.device("cuda", 1)]
    with pytest.raises(ConfigRefused, match=r"are available to each rank \(of 1 on this host\)"):
        Rank(files).executor.configure(config(device="cuda", tp=2, kv_cache_tokens_per_rank=201 * B), 1)
