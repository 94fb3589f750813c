"""NCCL: its calls against the recorder, what is said where it is absent, and on a GPU the real one."""

import sys
import threading
import types

import pytest
import torch

from rank_server.collectives.base import CollectiveError
from rank_server.collectives.nccl import CudaQueue, NcclBackend, NcclGroup, load_library
from tests.rank_server.collectives.harness import (
    DTYPES,
    TENSOR_OPS,
    call,
    check_mixed_operations,
    expected,
    open_groups,
    values,
)
from tests.rank_server.collectives.recorder import Communicator, HostQueue, Recorder, RecorderError
from tests.rank_server.threads import run_ranks


def recorded(size, timeout_s=20.0):
    module = Recorder()
    backends = [NcclBackend(module, HostQueue(module)) for _ in range(size)]
    return module, [groups["g"] for groups in open_groups(backends, {"g": range(size)}, timeout_s)]


def test_d9_every_member_calls_the_same_in_the_same_order():
    module, groups = recorded(3)
    run_ranks(3, lambda member: check_mixed_operations(groups[member]))
    (room,) = module.rooms.values()
    first, *others = [[each.what for each in room.streams[member]] for member in range(3)]
    assert others == [first, first]
    assert room.done == len(first) and len(first) > 50
    assert {what[0] for what in first} == {"all-gather", "broadcast", "sends and receives"}


def test_a_tensor_without_bytes_costs_nothing():
    module, groups = recorded(2)
    (room,) = module.rooms.values()
    before = room.done
    for op in TENSOR_OPS:
        assert run_ranks(2, lambda member, op=op: call(groups[member], op, torch.empty(2, 0)))[0].numel() == 0
    assert room.done == before


def test_low_precision_travels_as_it_is():
    module, groups = recorded(2)
    run_ranks(2, lambda member: groups[member].all_reduce(torch.ones(10, dtype=torch.bfloat16)))
    (room,) = module.rooms.values()
    assert room.streams[0][-1].what == ("all-gather", 20, Recorder.NCCL_UINT8)


def test_m1_an_error_that_nccl_reports_ends_the_wait(monkeypatch):
    _, groups = recorded(2, timeout_s=60.0)

    def broken(communicator):
        raise RecorderError("unhandled system error")

    monkeypatch.setattr(Communicator, "check_async_error", broken)
    with pytest.raises(CollectiveError, match="all_reduce failed: unhandled system error"):
        run_ranks(1, lambda _: groups[0].all_reduce(torch.ones(2)), deadline_s=5.0)


def test_m1_a_result_that_an_abort_cut_short_is_not_returned():
    _, groups = recorded(2, timeout_s=60.0)
    waiting = threading.Event()
    mark = groups[0]._queue.mark

    def marked():
        idle = mark()
        waiting.set()
        return idle

    groups[0]._queue.mark = marked

    def member(index):
        if index == 0:
            with pytest.raises(CollectiveError, match="closed"):
                groups[0].all_reduce(torch.ones(2))
        elif waiting.wait(5.0):
            groups[0].close()

    run_ranks(2, member, deadline_s=10.0)


def test_m1_members_that_come_too_late_find_no_communicator():
    """The connection that nobody waits for any more is given up as soon as it is there."""
    module = Recorder()
    backends = [NcclBackend(module, HostQueue(module)) for _ in range(2)]
    bootstrap = backends[0].prepare("g", range(2))
    with pytest.raises(CollectiveError, match=r"member 0 of 2: open failed: not all members came within 0\.05 s"):
        backends[0].open("g", range(2), 0, bootstrap, 0.05)
    with pytest.raises(CollectiveError, match=r"member 1 of 2|barrier failed"):
        run_ranks(1, lambda _: backends[1].open("g", range(2), 1, bootstrap, 5.0), deadline_s=10.0)


@pytest.mark.parametrize(("bootstrap", "said"), [(b"short", "a bootstrap of 5 bytes, NCCL's has 128"), (b"", "of 0 bytes")])
def test_a_bootstrap_of_another_size_is_refused(bootstrap, said):
    module = Recorder()
    with pytest.raises(CollectiveError, match=said):
        NcclBackend(module, HostQueue(module)).open("g", [0, 1], 1, bootstrap, 1.0)


def test_the_unique_id_survives_as_bytes():
    module = Recorder()
    assert NcclBackend(module, HostQueue(module)).prepare("g", [0, 1])[:4] == bytes([1, 255, 128, 127])


def test_m1_an_abort_waits_for_nobody_and_says_nothing(monkeypatch):
    """Freeing a communicator waits for the device, and so for the kernels of those that are aborted after it."""
    current = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append((device.index, threading.current_thread())))
    freed, aborted = threading.Event(), []

    class Stuck:
        def abort(self):
            assert freed.wait(5.0)
            aborted.append(threading.current_thread())
            raise RuntimeError("it was broken anyway")

    group = NcclGroup("g", 2, 0, 1.0, Recorder(), Stuck(), CudaQueue())
    group.close()
    group.close()
    assert not aborted
    freed.set()
    current[0][1].join(5.0)
    assert aborted == [current[0][1]] and [index for index, _ in current] == [3]


# -- where it is absent


def test_j2_without_cupy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ValueError, match="nccl collectives need cupy, of the extra gpu"):
        NcclBackend()


def test_j2_cupy_without_nccl_is_named(monkeypatch):
    """Then cupy's module can be imported all the same."""
    absent = types.SimpleNamespace(available=False)
    for name, module in {"cupy": types.ModuleType("cupy"), "cupy.cuda": types.SimpleNamespace(nccl=absent)}.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ValueError, match="need the NCCL library, of the extra gpu, beside cupy"):
        load_library()


# -- on a GPU


def _real():
    if not torch.cuda.is_available():
        return None, "needs a CUDA device"
    try:
        return load_library(), ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.gpu
@pytest.mark.parametrize("op", TENSOR_OPS)
def test_one_member_on_one_gpu(op, monkeypatch):
    """Solo groups are not NCCL's business, so the communicator of one member is made here."""
    library, reason = _real()
    if library is None:
        pytest.skip(reason)
    queue = CudaQueue()
    group = NcclGroup("g", 1, 0, 20.0, library, library.NcclCommunicator(1, library.get_unique_id(), 0), queue)
    for dtype in DTYPES:
        for shape in ((1,), (1, 5, 3), (1, 0), (1, 100_000)):
            x = values(0, shape, dtype)
            result, wanted = call(group, op, x.to(queue.device)), expected(op, [x], 0)
            assert torch.equal(result.cpu(), wanted) and result.device == queue.device
    group.barrier()
    group.close()
    with pytest.raises(CollectiveError, match="closed"):
        group.barrier()
