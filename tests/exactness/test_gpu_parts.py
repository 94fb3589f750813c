"""The whole engine with the parts that a GPU would use, on CPU: its attention functions, and nccl over the recorder."""

import importlib.util
import threading

import pytest

from rank_server.attention.gpu import GpuKernels
from rank_server.attention.kernels import KERNELS
from rank_server.collectives.nccl import NcclBackend
from tests import inproc
from tests.exactness.test_shapes import B, check, prompts_for
from tests.inproc import Shape
from tests.rank_server.attention.test_gpu import WAYS
from tests.rank_server.collectives.recorder import HostQueue, Recorder

GRIDS = [(1, 1, 1), (1, 2, 2), (2, 2, 4)]


@pytest.fixture
def recorder(monkeypatch):
    module = Recorder()
    monkeypatch.setattr(inproc, "LocalBackend", lambda hub: NcclBackend(module, HostQueue(module)))
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
