"""Rows of bytes to their slots of a cache: what a step's tokens store in a layer, in one call."""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from rank_server.compiled.emitter import I64, Emitter
from rank_server.compiled.memory import copy
from rank_server.compiled.tape import recorder
from rank_server.compiled.translation import Compiled, translate

_GIVEN = 6
"""The program's arguments: address of the slots, their number, slots of a cache, bytes of a row, number of pairs, slots beyond
the cache (0; an answer); then of each pair the address of the rows, their distance, the address of the cache."""
_OF_A_PAIR = 3


class RowStore:
    """Stores into caches [blocks, B, h, D], contiguous and alike, that a token has one row in each of."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        self._caches = caches
        self._dtype, self._addresses = caches[0].dtype, [cache.data_ptr() for cache in caches]
        blocks, block_size, self._heads, self._head_dim = caches[0].shape
        self._slots, self._row_bytes = blocks * block_size, self._heads * self._head_dim * self._dtype.itemsize
        self._arguments = ctypes.c_int64 * (_GIVEN + _OF_A_PAIR * len(caches))
        # Python's lock is kept: to give it away and get it back takes longer than the copy.
        # Threads that ask at the same time are given programs of their own, of which one is cached.
        self._compiled = _program()
        self._run = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self._compiled.address)

    def __call__(self, rows: Sequence[Tensor], slots: Tensor) -> bool:
        """Copies rows [T, h, D], one for each cache, to slots [T] int64; negative ones are skipped.

        False, with nothing done, where dtypes, of slots too, or shapes differ or a token's row is not in one piece. IndexError,
        with nothing done, for a slot beyond the cache.
        """
        if slots.dtype != torch.int64:
            return False
        pairs, shape = [], (slots.shape[0], self._heads, self._head_dim)
        for x, address in zip(rows, self._addresses, strict=True):
            of_token, of_head, of_number = x.stride()
            in_one_piece = of_number == 1 and (of_head == self._head_dim or self._heads == 1)
            if x.dtype != self._dtype or x.shape != shape or not in_one_piece:
                return False
            pairs += [x.data_ptr(), of_token * self._dtype.itemsize, address]
        slots = slots.contiguous()
        arguments = self._arguments(slots.data_ptr(), shape[0], self._slots, self._row_bytes, len(rows), 0, *pairs)
        self._run(arguments)

        def check() -> None:
            if arguments[_GIVEN - 1]:
                raise IndexError(f"slot {int(slots.max())} of a cache of {self._slots} slots")

        check()
        if (notes := recorder()) is not None:
            notes.note(self._compiled, ctypes.addressof(arguments), arguments)
            notes.checks.append(check)
        return True


@cache
def _program() -> Compiled:
    e = Emitter("store_rows")
    call = e.function.args[0]
    slots, count, room, row_bytes, pairs, _ = (e.load(call, I64, index) for index in range(_GIVEN))
    beyond = e.variable(e.integer(0))
    with e.loop(0, count) as token:
        outside = e.b.icmp_signed(">=", e.load(slots, I64, token), room)
        e.set(beyond, e.b.add(e.get(beyond), e.b.zext(outside, I64)))
    e.store(e.get(beyond), call, _GIVEN - 1)
    with e.b.if_then(e.b.icmp_signed("==", e.get(beyond), e.integer(0))), e.loop(0, pairs) as pair:
        place = e.at(e.times(pair, _OF_A_PAIR), _GIVEN)
        rows, stride, store = (e.load(call, I64, e.at(place, index)) for index in range(_OF_A_PAIR))
        with e.loop(0, count) as token:
            slot = e.load(slots, I64, token)
            with e.b.if_then(e.b.icmp_signed(">=", slot, e.integer(0))):
                copy(e, e.at(store, e.times(slot, row_bytes)), e.at(rows, e.times(token, stride)), row_bytes)
    return translate(e)
