"""Chunks that shared memory lends."""

import gc
import os
import time

import pytest
import torch

from rank_server.collectives.shm_group import LENT_BYTES, ShmGroup
from rank_server.collectives.shm_segment import Control
from tests.rank_server.collectives.harness import Implementation, expected, values
from tests.rank_server.collectives.processes import DEADLINE_S
from tests.rank_server.threads import run_ranks


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_lent_stays_while_the_others_go_on(size: int) -> None:
    """Chunks lie in the input and in the others' slots; they are read when all others have begun their next call."""
    groups = Implementation("shm", size).open()
    shape = (size, LENT_BYTES // 4)
    inputs, more = ([values(member, shape, torch.float32, seed) for member in range(size)] for seed in (0, 1))

    def member(index: int) -> None:
        group = groups[index]
        assert isinstance(group, ShmGroup) and group._segment is not None
        (lent,) = group.all_to_all_lent(inputs[index])
        assert lent[index].data_ptr() == inputs[index][index].data_ptr()
        if index == 0:
            following, end = group._rounds + 1, time.monotonic() + DEADLINE_S
            words = [control for other, control in enumerate(group._segment.control) if other != index]
            while any(control[Control.ROUND[following % 2]] != following for control in words):
                assert time.monotonic() < end
                os.sched_yield()
            wanted = expected("all_to_all", inputs, index)
            assert wanted is not None and torch.equal(torch.stack(list(lent)), wanted)
        wanted = expected("all_to_all", more, index)
        assert wanted is not None and torch.equal(torch.stack(list(group.all_to_all_lent(more[index])[0])), wanted)
        group.barrier()

    run_ranks(size, member)


def test_chunks_that_do_not_fit_a_slot_are_not_lent() -> None:
    groups = Implementation("shm_small", 3).open()
    inputs = [values(member, (3, LENT_BYTES // 4), torch.float32) for member in range(3)]

    def member(index: int) -> None:
        wanted = expected("all_to_all", inputs, index)
        (lent,) = groups[index].all_to_all_lent(inputs[index])
        assert wanted is not None and torch.equal(torch.stack(list(lent)), wanted)

    run_ranks(3, member)


@pytest.mark.parametrize(
    "widths", [(LENT_BYTES // 4, 3), (5, LENT_BYTES // 4, 2), (LENT_BYTES // 4, 0), (0, LENT_BYTES // 4)], ids=str
)
@pytest.mark.parametrize("size", [2, 3])
def test_several_tensors_are_lent_in_one_round(size: int, widths: tuple[int, ...]) -> None:
    """Also where one of them is empty: whether others lend depends on nothing but what all announce, the bytes."""
    groups = Implementation("shm", size).open()
    inputs = [[values(member, (size, width, 1), torch.float32, width) for width in widths] for member in range(size)]

    def member(index: int) -> None:
        group = groups[index]
        assert isinstance(group, ShmGroup)
        before = group._rounds
        lent = group.all_to_all_lent(*inputs[index])
        assert (group.calls, group._rounds - before) == (1, 1)
        for number, chunks in enumerate(lent):
            wanted = expected("all_to_all", [each[number] for each in inputs], index)
            assert wanted is not None and torch.equal(torch.stack(list(chunks)), wanted)
        group.barrier()

    run_ranks(size, member)


def test_what_is_lent_outlives_the_group() -> None:
    groups = Implementation("shm", 2).open()
    inputs = [values(member, (2, LENT_BYTES // 4), torch.float32) for member in range(2)]
    lent = run_ranks(2, lambda index: groups[index].all_to_all_lent(inputs[index])[0])
    for group in groups:
        group.close()
    gc.collect()
    assert torch.equal(lent[0][1], inputs[1][0]) and torch.equal(lent[1][0], inputs[0][1])
