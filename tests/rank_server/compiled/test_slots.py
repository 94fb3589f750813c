"""Rows of a step at their slots, against indexing."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rank_server.compiled import slots as module
from rank_server.compiled.slots import RowStore

BLOCKS, BLOCK_SIZE = 3, 4
SLOTS = BLOCKS * BLOCK_SIZE
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def caches(number: int, heads: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.full((BLOCKS, BLOCK_SIZE, heads, head_dim), -1.0, dtype=dtype) for _ in range(number)]


@given(
    slots=st.lists(st.integers(0, SLOTS - 1), unique=True).flatmap(lambda own: st.permutations([*own, -1, -1])),
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 40),
    number=st.integers(1, 2),
    dtype=st.sampled_from(DTYPES),
    gap=st.integers(0, 2),
)
@settings(max_examples=200)
def test_rows_lie_at_their_slots_and_nowhere_else(slots, heads, head_dim, number, dtype, gap):
    """Rows are columns of something wider, one behind the other or with a gap."""
    got, wanted = (caches(number, heads, head_dim, dtype) for _ in range(2))
    wide = torch.randn(len(slots), number * heads + gap, head_dim).to(dtype)
    rows = [wide[:, index * heads : (index + 1) * heads] for index in range(number)]
    assert RowStore(got)(rows, torch.tensor(slots))
    own = [(token, slot) for token, slot in enumerate(slots) if slot >= 0]
    for cache, x in zip(wanted, rows, strict=True):
        for token, slot in own:
            cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = x[token]
    assert all(torch.equal(each, want) for each, want in zip(got, wanted, strict=True))


def test_no_rows():
    store = caches(2, 2, 8, torch.float32)
    assert RowStore(store)([torch.empty(0, 2, 8)] * 2, torch.empty(0, dtype=torch.int64))
    assert all((each == -1).all() for each in store)


@pytest.mark.parametrize("slot", [SLOTS, SLOTS + 5, 1 << 60])
def test_a_slot_beyond_the_cache_is_refused_before_anything_is_written(slot):
    store = caches(2, 2, 8, torch.float32)
    with pytest.raises(IndexError, match=f"slot {slot} of a cache of {SLOTS} slots"):
        RowStore(store)([torch.zeros(3, 2, 8)] * 2, torch.tensor([0, slot, 1]))
    assert all((each == -1).all() for each in store)


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(2, 2, 8, dtype=torch.bfloat16),
        torch.zeros(2, 8, 2).transpose(1, 2),
        torch.zeros(2, 4, 8)[:, ::2],
        torch.zeros(3, 2, 8),
        torch.zeros(2, 2, 7),
        torch.zeros(2, 1, 8),
    ],
    ids=["another dtype", "spread numbers", "spread heads", "more tokens", "narrower heads", "fewer heads"],
)
def test_what_it_cannot_copy_is_left_alone(rows):
    store = caches(1, 2, 8, torch.float32)
    assert not RowStore(store)([rows], torch.tensor([0, 1]))
    assert (store[0] == -1).all()


def test_slots_of_another_width_are_left_alone():
    (store,) = caches(1, 1, 8, torch.float32)
    assert not RowStore([store])([torch.zeros(2, 1, 8)], torch.tensor([0, 1], dtype=torch.int32))
    assert (store == -1).all()


def test_slots_need_not_be_contiguous():
    store = caches(1, 1, 8, torch.float32)
    assert RowStore(store)([torch.zeros(2, 1, 8)], torch.tensor([0, 5, 7, 5])[::2])
    assert (store[0].view(SLOTS, 8) == 0).all(1).nonzero().flatten().tolist() == [0, 7]


def test_the_program_lives_as_long_as_its_user() -> None:
    """Also where another thread's translation took its place in the cache."""
    module._program.cache_clear()
    (store,) = caches(1, 1, 8, torch.float32)
    written = RowStore([store])
    module._program.cache_clear()
    gc.collect()
    assert written([torch.ones(1, 1, 8)], torch.tensor([2])) and (store.view(-1, 8)[2] == 1).all()
