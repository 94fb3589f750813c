"""What only the shared-memory backend can get wrong: its memory, its places, its rounds."""

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rank_server.collectives.base import CollectiveError
from rank_server.collectives.shm import ShmBackend
from rank_server.collectives.shm_segment import Segment
from rank_server.collectives.shm_semaphore import Semaphores
from tests.rank_server.collectives.harness import SMALL_SLOT, Implementation, call, expected, open_groups, values
from tests.rank_server.collectives.processes import DEADLINE_S, Start
from tests.rank_server.threads import run_ranks


@pytest.fixture
def start() -> Iterator[Start]:
    starter = Start()
    yield starter
    starter.stop()


def segments_of(pid: int) -> list[str]:
    """Lines of the process's memory map that show a segment."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:kvloom" in line]


@pytest.mark.cluster
def test_m1_a_dead_peer_is_named_by_whoever_waits_for_it(start: Start) -> None:
    members = start("shm", "endless", 2, 300.0)
    assert [member.line() for member in members] == ["running"] * 2
    members[1].process.kill()
    assert members[0].line() == "lost: group g, member 0 of 2: all_reduce failed: member 1 died"


@pytest.mark.cluster
def test_k9_nothing_is_left_when_all_members_are_killed(start: Start) -> None:
    before = set(os.listdir("/dev/shm"))
    members = start("shm", "endless", 2, 300.0)
    assert [member.line() for member in members] == ["running"] * 2
    # No name anywhere: the memory goes with the last process that maps it.
    for member in members:
        assert segments_of(member.process.pid)
        assert all("(deleted)" in line for line in segments_of(member.process.pid))
    assert set(os.listdir("/dev/shm")) <= before
    for member in members:
        member.process.send_signal(signal.SIGKILL)
    for member in members:
        assert member.process.wait(DEADLINE_S) == -signal.SIGKILL
    assert set(os.listdir("/dev/shm")) <= before


def descriptors() -> set[tuple[str, str]]:
    """This process's, each with what it stands for."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def test_groups_give_their_memory_and_descriptors_back() -> None:
    def open_and_close() -> None:
        backends = Implementation("shm", 2).backends()
        for _ in range(3):
            backends[0].prepare("g", range(2))  # never opened: the next one takes its place
        for groups in open_groups(backends, {"g": range(2)}):
            groups["g"].close()

    open_and_close()
    gc.collect()
    before, segments = descriptors(), len(segments_of(os.getpid()))
    for _ in range(3):
        open_and_close()
    gc.collect()
    # What other tests have left behind may go meanwhile.
    assert not descriptors() - before
    assert len(segments_of(os.getpid())) == segments


@pytest.mark.parametrize("op", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast"])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_tensors_around_the_size_of_a_slot_and_of_several(op: str, extra: int) -> None:
    size = 3
    groups = Implementation("shm_small", size).open()
    for pieces in (1, 2, 5):
        # One byte per element: the borders of the pieces are hit exactly.
        width = pieces * (SMALL_SLOT // size if op in ("reduce_scatter", "all_to_all") else SMALL_SLOT) + extra
        shape = (size, width) if op in ("reduce_scatter", "all_to_all") else (width,)
        inputs = [(values(member, shape, torch.int64) % 40).to(torch.uint8) for member in range(size)]
        results = run_ranks(size, lambda member: call(groups[member], op, inputs[member], 1))  # noqa: B023
        for member, result in enumerate(results):
            if op in ("all_reduce", "reduce_scatter"):
                wanted: Tensor | None = torch.stack(inputs).sum(0).to(torch.uint8)
                wanted = wanted if op == "all_reduce" else wanted[member]  # type: ignore[index]
            else:
                wanted = expected(op, inputs, member, 1)
            assert wanted is not None and torch.equal(result, wanted)


def test_the_deadline_covers_all_pieces_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = Implementation("shm_small", 2).backends()
    groups = [opened["g"] for opened in open_groups(backends, {"g": range(2)})]
    semaphores = backends[1]._semaphores  # type: ignore[attr-defined]
    post = semaphores.post
    monkeypatch.setattr(semaphores, "post", lambda address: threading.Event().wait(0.1) or post(address))
    groups[0].set_timeout(0.35)
    x = torch.ones(100 * SMALL_SLOT, dtype=torch.uint8)

    def member_main(member: int) -> float:
        begun = time.monotonic()
        # Member 1 is in time for every single piece, but not for all of them.
        with pytest.raises(CollectiveError, match="did not come within 0.35 s" if member == 0 else "has left"):
            groups[member].all_gather(x)
        return time.monotonic() - begun

    assert 0.35 <= run_ranks(2, member_main)[0] < 5.0


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (lambda group: group.all_reduce(torch.zeros(2, 4)), "all_reduce of 32 bytes"),
        (lambda group: group.all_gather(torch.zeros(2, 5)), "all_gather of 40 bytes"),
        (lambda group: group.all_to_all(torch.zeros(2, 4)), "all_to_all of 32 bytes"),
        (lambda group: group.broadcast(torch.zeros(2, 4), 1), "broadcast from 1 of 32 bytes"),
        (lambda group: group.barrier(), "barrier of 0 bytes"),
    ],
    ids=["all_reduce", "size", "all_to_all", "broadcast", "barrier"],
)
def test_d10_members_that_disagree_all_raise_naming_both_calls(odd, named: str) -> None:
    groups = Implementation("shm", 2).open()

    def member_main(member: int) -> str:
        with pytest.raises(CollectiveError) as caught:
            odd(groups[1]) if member == 1 else groups[0].all_gather(torch.zeros(2, 4))
        return str(caught.value)

    for message in run_ranks(2, member_main, deadline_s=5.0):
        assert "all_gather of 32 bytes" in message
        assert named in message


def test_d10_members_that_disagree_about_the_root() -> None:
    groups = Implementation("shm", 2).open()

    def member_main(member: int) -> str:
        with pytest.raises(CollectiveError) as caught:
            groups[member].broadcast(torch.zeros(1), member)
        return str(caught.value)

    for message in run_ranks(2, member_main, deadline_s=5.0):
        assert "broadcast from 0" in message
        assert "broadcast from 1" in message


def test_m2_a_member_that_leaves_after_an_operation_does_not_spoil_it_for_the_others() -> None:
    for _ in range(20):
        groups = Implementation("shm", 3).open()

        def member_main(member: int, groups=groups) -> list[float]:
            result = groups[member].all_reduce(torch.ones(2))
            groups[member].close()
            return result.tolist()

        assert run_ranks(3, member_main) == [[3.0, 3.0]] * 3


def test_members_may_have_spare_descriptors_only_of_segments(tmp_path: Path) -> None:
    semaphores = Semaphores()
    segment, bootstrap = Segment.create(2, 4096, semaphores)
    _, _, number, key = bootstrap.decode().split(":")
    (tmp_path / "other").write_bytes(bytes(100_000))
    with (tmp_path / "other").open("r+b") as other, (tmp_path / "short").open("w+b") as short:
        reader, writer = os.pipe()
        for wrong in (
            f"memfd:{os.getpid()}:{other.fileno()}:{key}",
            f"memfd:{os.getpid()}:{short.fileno()}:{key}",
            f"memfd:{os.getpid()}:{reader}:{key}",
            f"memfd:{os.getpid()}:{number}:{'0' * 32}",
            f"memfd:../1:{number}:{key}",
            f"/proc/self/fd/{number}",
        ):
            with pytest.raises((ValueError, OSError)):
                Segment.open(wrong.encode(), 2, semaphores)
        os.close(reader)
        os.close(writer)
    with pytest.raises(ValueError, match="no segment of 3 members"):
        Segment.open(bootstrap, 3, semaphores)
    opened = Segment.open(bootstrap, 2, semaphores)
    assert (opened.size, opened.slot_bytes) == (segment.size, segment.slot_bytes) == (2, 4096)


def test_a_place_is_taken_once_and_free_again_when_its_member_is_gone() -> None:
    semaphores = Semaphores()
    segment, bootstrap = Segment.create(2, 4096, semaphores)
    member = Segment.open(bootstrap, 2, semaphores)
    member.join(1)
    assert segment.alive(1)
    with pytest.raises(OSError):
        segment.join(1)
    segment.join(0)
    assert member.alive(0)
    del member
    gc.collect()
    assert not segment.alive(1)


def test_a_group_whose_first_member_is_gone_is_refused_at_once() -> None:
    backend = ShmBackend()
    with pytest.raises(CollectiveError, match=r"group g, member 1 of 2: open failed"):
        backend.open("g", range(2), 1, b"memfd:4194999:3:" + b"0" * 32, 30.0)


@pytest.mark.parametrize("size", [0, 1, 257])
def test_sizes_of_a_segment_are_bounded(size: int) -> None:
    with pytest.raises(ValueError, match=f"not {size}"):
        Segment.create(size, 4096, Semaphores())


def test_a_system_without_the_calls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldLibrary:
        sem_init = sem_post = sem_trywait = None

        def __getattr__(self, name: str) -> None:
            raise AttributeError(f"libc.so.6: undefined symbol: {name}")

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda name: OldLibrary())
        with pytest.raises(CollectiveError, match="the C library has no sem_clockwait"):
            ShmBackend()
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(CollectiveError, match="memfd_create"):
        ShmBackend()


def test_tensors_of_another_device_are_refused() -> None:
    groups = Implementation("shm", 2).open()
    for op in ("all_gather", "all_to_all"):
        with pytest.raises(ValueError, match="CPU tensors, not meta"):
            call(groups[0], op, torch.ones(2, 2, device="meta"))


def test_a_semaphore_counts_posts_and_waits_no_longer_than_asked() -> None:
    semaphores = Semaphores()
    segment, _ = Segment.create(2, 4096, semaphores)
    there, back = segment.semaphore(0, 1), segment.semaphore(1, 0)
    semaphores.post(there)
    semaphores.post(there)
    assert semaphores.try_wait(back) != 0
    assert semaphores.wait(there, 5.0)
    assert semaphores.try_wait(there) == 0
    begun = time.monotonic()
    assert not semaphores.wait(there, 0.05)
    assert 0.04 <= time.monotonic() - begun < 5.0
