"""Exchanges on a tape: those of plain calls, also where a member is late, leaves, or has no tape."""

import ctypes
import threading

import pytest
import torch

from rank_server.collectives.base import CollectiveError
from rank_server.collectives.local import LocalBackend, LocalHub
from rank_server.collectives.shm import ShmBackend
from rank_server.collectives.shm_exchange import MOST_AHEAD
from rank_server.collectives.shm_group import LENT_BYTES, ShmGroup
from rank_server.collectives.shm_program import ASKED, Word
from rank_server.compiled.tape import NotRecordable, recording
from rank_server.models.compiled_linear import CompiledGated, CompiledLinear, programs
from tests.rank_server.collectives.harness import open_groups
from tests.rank_server.threads import run_ranks

BF16 = torch.bfloat16


def opened(size: int, timeout_s: float = 20.0, slot_bytes: int = 4096):
    return [groups["g"] for groups in open_groups([ShmBackend(slot_bytes) for _ in range(size)], {"g": range(size)}, timeout_s)]


class Taped:
    """A member's sum and gather, recorded in its first call."""

    def __init__(self, group) -> None:
        self.group = group
        self.x = torch.zeros(40, dtype=BF16)
        self.tape = None

    def plain(self, value: float):
        self.x.fill_(value)
        return self.group.all_reduce(self.x), self.group.all_gather(self.x)

    def __call__(self, value: float):
        self.x.fill_(value)
        if self.tape is None:
            with recording() as notes:
                self.results = self.group.all_reduce(self.x), self.group.all_gather(self.x)
            self.tape = notes.tape()
        else:
            self.tape.run()
        return self.results


@pytest.fixture
def asleep(monkeypatch):
    """Set when a member has waited for longer than it spins."""
    event, sleep = threading.Event(), ShmGroup._sleep

    def observed(self, *arguments):
        event.set()
        return sleep(self, *arguments)

    monkeypatch.setattr(ShmGroup, "_sleep", observed)
    return event


def check(results, values) -> None:
    total, parts = results
    assert (total == sum(values)).all()
    assert [part.unique().tolist() for part in parts] == [[value] for value in values]


@pytest.mark.parametrize("size", [2, 3])
def test_tapes_exchange_what_lies_there_in_every_run(size):
    members = [Taped(group) for group in opened(size)]
    for run in range(4):
        values = [float(10 * member + run) for member in range(size)]
        for results in run_ranks(size, lambda member: members[member](values[member])):  # noqa: B023
            check(results, values)
    assert [member.group.calls for member in members] == [8] * size
    assert all(0 < member.group.seconds < 20 for member in members)


def test_a_member_with_a_tape_and_one_without_understand_each_other():
    members = [Taped(group) for group in opened(2)]
    for run in range(4):
        values = [1.0 + run, 2.0 * run]
        found = run_ranks(2, lambda member: (members[member] if member == run % 2 else members[member].plain)(values[member]))  # noqa: B023
        for results in found:
            check(results, values)


def test_a_tape_waits_for_a_late_member_and_goes_on_behind_it(asleep):
    members = [Taped(group) for group in opened(2)]
    run_ranks(2, lambda member: members[member](0.0))
    asleep.clear()

    def late(member: int):
        assert member == 0 or asleep.wait(10.0)
        return members[member](1.0 + member)

    for results in run_ranks(2, late):
        check(results, [1.0, 2.0])
    assert [member.group.calls for member in members] == [4, 4]
    for results in run_ranks(2, lambda member: members[member](5.0)):
        check(results, [5.0, 5.0])


def test_a_tape_ends_when_a_member_leaves_or_does_not_come_or_does_something_else():
    def leave(group):
        group.close()

    def other(group):
        with pytest.raises(CollectiveError):
            group.all_gather(torch.zeros(40, dtype=BF16))

    for what, message in ((leave, "left"), (lambda group: None, "did not come within"), (other, "calls all_")):
        members = [Taped(group) for group in opened(2, timeout_s=0.3)]
        run_ranks(2, lambda member: members[member](0.0))  # noqa: B023

        def rank_main(member: int):
            if member == 1:
                what(members[1].group)  # noqa: B023
                return
            with pytest.raises(CollectiveError, match=message):  # noqa: B023
                members[0](1.0)  # noqa: B023
            # The group can't be used again, by a tape or otherwise.
            for use in (members[0], members[0].plain):  # noqa: B023
                with pytest.raises(CollectiveError, match="can't be used"):
                    use(1.0)

        run_ranks(2, rank_main)


def test_closing_a_group_ends_its_tape_in_the_middle(asleep):
    members = [Taped(group) for group in opened(2)]
    run_ranks(2, lambda member: members[member](0.0))
    asleep.clear()

    def rank_main(member: int):
        if member == 1:
            assert asleep.wait(10.0)
            members[0].group.close()
            return
        with pytest.raises(CollectiveError):
            members[0](1.0)

    run_ranks(2, rank_main)


def test_who_waits_asks_for_what_the_next_product_reads():
    """Of one matrix, of two in turn, never of more than a part of a cache; and nothing where no product follows, or only
    behind another exchange."""
    matrix, gate, up = (torch.full((64, width), 0.5, dtype=BF16) for width in (40, 64, 64))
    large = torch.full((MOST_AHEAD // 80 + 1, 64), 0.25, dtype=BF16)
    small, gated, wide = (
        CompiledLinear.of(matrix, None, programs(False)),
        CompiledGated.of(gate, up, programs(True)),
        CompiledLinear.of(large, None, programs(False)),
    )

    def compute(group, x):
        for product in (small, gated, wide):
            x = product(group.all_reduce(group.all_reduce(x)))
        return group.all_gather(x[:, :8])

    groups = opened(2)
    xs = [torch.full((1, 40), 1.0 + member, dtype=BF16) for member in range(2)]

    def rank_main(member: int):
        with torch.inference_mode():
            wanted = compute(groups[member], xs[member])
            with recording() as notes:
                found = compute(groups[member], xs[member])
            found[0].zero_()
            notes.tape().run()
        assert all(map(torch.equal, found, wanted))
        exchanges = [
            (ctypes.c_int64 * Word.SIZE).from_address(argument) for _, argument, _, may_stop in notes.calls if may_stop
        ]
        return [tuple(each[word] for word in range(Word.AHEAD, Word.SIZE)) for each in exchanges]

    of_large = (large.data_ptr(), large.data_ptr() + ASKED, 2 * ASKED, MOST_AHEAD)
    nothing = (0, 0, 0, 0)
    of_matrix = (matrix.data_ptr(), matrix.data_ptr() + ASKED, 2 * ASKED, 64 * 40 * 2)
    of_two = (gate.data_ptr(), up.data_ptr(), ASKED, 64 * 64 * 2)
    wanted = [nothing, of_matrix, nothing, of_two, nothing, of_large, nothing]
    assert large.nbytes > MOST_AHEAD
    assert run_ranks(2, rank_main) == [wanted] * 2


def refused(call) -> str:
    with recording() as notes:
        call()
    with pytest.raises(NotRecordable) as error:
        notes.tape()
    return str(error.value)


def test_what_is_no_single_compiled_call_is_refused():
    big = torch.zeros(4096, dtype=BF16)
    groups = opened(2)
    assert (
        run_ranks(2, lambda member: refused(lambda: groups[member].all_reduce(big)))
        == ["all_reduce of 8192 bytes in group g, which is not one compiled call"] * 2
    )
    hub = LocalHub()
    local = [each["g"] for each in open_groups([LocalBackend(hub) for _ in range(2)], {"g": range(2)}, 20.0)]
    assert run_ranks(2, lambda member: refused(lambda: local[member].all_reduce(big[:16]))) == ["all_reduce of group g"] * 2


def test_chunks_that_are_lent_are_refused_because_they_move():
    groups = opened(2, slot_bytes=LENT_BYTES)
    x = torch.zeros(2, LENT_BYTES // 4, dtype=BF16)
    found = run_ranks(2, lambda member: refused(lambda: groups[member].all_to_all_lent(x)))
    assert found == ["chunks that group g lends: each round has them elsewhere"] * 2
