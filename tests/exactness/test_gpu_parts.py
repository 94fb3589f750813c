"""The whole engine with the parts that a GPU would use, on CPU: its attention functions, and nccl over the recorder."""

import importlib.util
import threading

import pytest

from coordinator.plan import Gather
from rank_server.attention.gpu import GpuKernels
from rank_server.attention.kernels import KERNELS
from rank_server.collectives.nccl import NcclBackend
from rank_server.executor import Executor
from tests import inproc_ranks
from tests.exactness.test_shapes import B, check, prompts_for
from tests.inproc import Shape
from tests.rank_server.attention.test_gpu import WAYS
from tests.rank_server.collectives.recorder import HostQueue, Recorder
from tests.rank_server.pretend import PretendGpu
from tests.rank_server.test_pretend import GPU

GRIDS = [(1, 1, 1), (1, 2, 2), (2, 2, 4)]


@pytest.fixture
def recorder(monkeypatch):
    module = Recorder()
    monkeypatch.setattr(inproc_ranks, "LocalBackend", lambda hub: NcclBackend(module, HostQueue(module)))
    return module


@pytest.fixture
def one_at_a_time(monkeypatch):
    """Triton's interpreter keeps the running program in globals, so ranks that are threads take turns."""
    if importlib.util.find_spec("triton") is None:
        return
    from rank_server.attention import triton_decode

    lock, paged_decode = threading.Lock(), triton_decode.paged_decode

    def locked(*args):
        with lock:
            return paged_decode(*args)

    monkeypatch.setattr(triton_decode, "paged_decode", locked)


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("use_triton", WAYS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_tokens_are_those_of_the_reference(tiny, monkeypatch, recorder, grid, use_triton):
    monkeypatch.setitem(KERNELS, "cpu", lambda device: GpuKernels(8, use_triton))
    tp, pcp, dcp = grid
    shape = Shape(tp=tp, pcp=pcp, dcp=dcp, block_size=B, budget=16)
    check(tiny(heads=8, kv_heads=1), shape, prompts_for(B * dcp, 200, seed=dcp)[-5:], new_tokens=3)
    assert bool(recorder.rooms) == (grid != (1, 1, 1))
    for room in recorder.rooms.values():
        first, *others = [[each.what for each in stream] for _, stream in sorted(room.streams.items())]
        assert first and all(other == first for other in others)


def on_the_gpu_that_is_not_there(method):
    """A command of an executor, on whatever thread it runs, as on a GPU."""

    def command(self, *args, **settings):
        with PretendGpu(GPU):
            return method(self, *args, **settings)

    return command


@pytest.fixture
def pretended(monkeypatch):
    def configure(self, config, *args, **settings):
        config.device = "cuda"
        return original(self, config, *args, **settings)

    original = Executor.configure
    for name, method in {"configure": configure, "allocate_pool": Executor.allocate_pool, "run": Executor.run}.items():
        monkeypatch.setattr(Executor, name, on_the_gpu_that_is_not_there(method))
    monkeypatch.setattr("rank_server.place.claim", lambda name, rank: GPU)
    monkeypatch.setattr("rank_server.executor.free_bytes", lambda device: 1 << 40)
    monkeypatch.setitem(KERNELS, "cuda", lambda device: GpuKernels(8, use_triton=False))


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
@pytest.mark.parametrize("pcp_gather", [Gather.Q, Gather.KV])
@pytest.mark.parametrize("always_owner", [False, True])
@pytest.mark.parametrize("grid", [(1, 2, 1), (1, 2, 2), (2, 2, 4)], ids=str)
def test_every_way_of_a_step_keeps_to_the_device(tiny, grid, always_owner, pcp_gather, family):
    tp, pcp, dcp = grid
    path = tiny(family=family, heads=8, kv_heads=1) if family == "llama" else tiny(family=family)
    chosen = {"always_owner": always_owner, "pcp_gather": Gather.KV if dcp == 1 else pcp_gather}
    shape = Shape(tp=tp, pcp=pcp, dcp=dcp, block_size=B, budget=16, **chosen)
    check(path, shape, prompts_for(B * dcp, 200, seed=dcp)[-3:], new_tokens=3)
