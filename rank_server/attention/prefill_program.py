"""A program for the attention of many queries over bf16 keys: see `cpu_prefill` for what it is given.

The queries of a KV head stand side by side in the lanes of vectors, so that softmax needs no exchange between lanes and a key's
numbers are broadcast to all of them. A thread takes blocks of queries; it brings their keys a tile at a time to memory of its
own, and for each group of a block computes scores, softmax weights relative to the highest score so far (rounded to bf16) and
weighted values. Scores, exponentials and sums are fp32; the weights that are summed are the rounded ones.
"""

import math
from collections.abc import Callable

import numpy as np
from llvmlite import ir

from rank_server.attention.prefill_tile import ABREAST, GROUP, ROW, TILE, VECTORS, Layout, TileMath
from rank_server.compiled.emitter import F32, F64, HALVES, I32, I64, LANES, LINE, VECTOR, WORDS, Emitter
from rank_server.compiled.team import thread_of
from rank_server.compiled.translation import Compiled, translate

ARGUMENT = np.dtype(
    [
        ("next", np.int64),  # item that nobody has taken yet
        ("q", np.int64),  # addresses of bf16 numbers, then strides in bytes; a head's numbers are consecutive
        ("k", np.int64),
        ("v", np.int64),
        ("q_token", np.int64),
        ("q_head", np.int64),
        ("k_token", np.int64),
        ("k_head", np.int64),
        ("v_token", np.int64),
        ("v_head", np.int64),
        ("out", np.int64),  # address of fp32 [T, h, value_dim]
        ("lse", np.int64),  # address of fp32 [T, h]
        ("visible", np.int64),  # address of int64 [T]
        ("tables", np.int64),  # address of int64 block tables, one after the other
        ("items", np.int64),  # address of int64 [num_items, ITEM_FIELDS], see `cpu_prefill.Items`
        ("num_items", np.int64),
        ("kv_heads", np.int64),
        ("block_size", np.int64),
        ("scratch", np.int64),  # address of [threads, scratch_bytes], at a multiple of LINE
        ("scale", np.float64),  # > 0
    ]
)
"""What the program is given the address of."""
ITEM_FIELDS = 5
Visit = Callable[[ir.Value, ir.Value, ir.Value], None]


def scratch_bytes(key_dim: int, value_dim: int) -> int:
    """Memory of a thread."""
    return Layout(key_dim, value_dim).size


class PrefillProgram:
    """share: query heads of a KV head; key_dim, value_dim: multiples of LANES; team: whether OpenMP's threads run it together.

    Only for processors with `avx512.available`.
    """

    def __init__(self, share: int, key_dim: int, value_dim: int, team: bool) -> None:
        self._share, self._key_dim, self._value_dim = share, key_dim, value_dim
        self._e = e = Emitter("prefill")
        self._layout = Layout(key_dim, value_dim)
        self._call = e.fields(ARGUMENT)
        self._heads = e.times(self._call["kv_heads"], share)
        thread, _ = thread_of(e, team)
        self._scratch = e.at(self._call["scratch"], e.times(thread, self._layout.size))
        binary_scale = e.splat(e.b.fptrunc(e.b.fmul(self._call["scale"], ir.Constant(F64, math.log2(math.e))), F32))
        self._math = TileMath(e, self._scratch, binary_scale, key_dim, value_dim)
        with e.shared_loop(e.function.args[0], self._call["num_items"]) as number:
            item = e.at(self._call["items"], e.times(number, 8 * ITEM_FIELDS))
            self._attend(*(e.load(item, I64, i) for i in range(ITEM_FIELDS)))

    def translate(self) -> Compiled:
        """Machine code for this processor."""
        return translate(self._e)

    def _own(self, offset: int) -> ir.Value:
        return self._e.at(self._scratch, offset)

    def _attend(self, table: ir.Value, q_start: ir.Value, kv_head: ir.Value, first: ir.Value, count: ir.Value) -> None:
        """Queries first … first + count − 1 of a row and a KV head; query p is that of token p // share."""
        e, layout = self._e, self._layout
        table = e.at(self._call["tables"], e.times(table, 8))
        most = e.variable(e.integer(0))
        groups = e.b.sdiv(e.at(count, GROUP - 1), e.integer(GROUP))
        with e.loop(0, groups) as number:
            group = e.at(self._scratch, e.times(number, layout.group_size))
            left = e.b.sub(count, e.times(number, GROUP))
            self._fill(group, q_start, kv_head, e.at(first, e.times(number, GROUP)), left)
            e.set(most, e.most(e.load(e.at(group, layout.most), I64), e.get(most)))
        with e.loop(0, e.get(most), TILE) as begin:
            stop, after = (e.least(e.at(begin, distance), e.get(most)) for distance in (TILE, 2 * TILE))
            self._bring(table, kv_head, begin, stop)
            self._walk(table, kv_head, stop, after, self._expect)
            with e.loop(0, groups) as number:
                group = e.at(self._scratch, e.times(number, layout.group_size))
                keys = e.b.sub(e.least(stop, e.load(e.at(group, layout.most), I64)), begin)
                keys = e.b.and_(e.at(keys, ABREAST - 1), e.integer(-ABREAST))
                narrow = e.b.icmp_signed("<=", e.b.sub(count, e.times(number, GROUP)), e.integer(LANES))
                with e.b.if_then(e.b.icmp_signed(">", keys, e.integer(0))), e.b.if_else(narrow) as (one, all_of_them):
                    for branch, vectors in ((one, 1), (all_of_them, VECTORS)):
                        with branch:
                            self._math.attend(group, vectors, begin, keys)
        with e.loop(0, groups) as number:
            group = e.at(self._scratch, e.times(number, layout.group_size))
            self._finish(group, e.b.sub(count, e.times(number, GROUP)))

    def _fill(self, group: ir.Value, q_start: ir.Value, kv_head: ir.Value, first: ir.Value, left: ir.Value) -> None:
        """Brings a group's queries, and what it begins with; lanes from `left` on repeat a query and see nothing."""
        e, layout = self._e, self._layout
        most = e.variable(e.integer(0))
        head = e.times(kv_head, self._share)
        with e.loop(0, GROUP) as lane:
            query = e.at(first, e.least(lane, e.at(left, -1)))
            token = e.at(q_start, e.b.sdiv(query, e.integer(self._share)))
            whose = e.at(head, e.b.srem(query, e.integer(self._share)))
            at = e.at(self._call["q"], e.times(token, self._call["q_token"]), e.times(whose, self._call["q_head"]))
            e.store(at, e.at(group, layout.addresses), lane)
            e.store(e.at(e.times(token, self._heads), whose), e.at(group, layout.places), lane)
            seen = e.load(self._call["visible"], I64, token)
            seen = e.b.select(e.b.icmp_signed("<", lane, left), seen, e.integer(0))
            e.store(e.b.trunc(seen, I32), e.at(group, layout.visible), lane)
            e.set(most, e.most(seen, e.get(most)))
        e.store(e.get(most), e.at(group, layout.most))
        with e.loop(0, VECTORS) as vector:
            e.store(e.number(-math.inf, VECTOR), e.at(group, layout.highest), vector)
            e.store(e.number(0.0, VECTOR), e.at(group, layout.sums), vector)
            rows = [e.load(e.at(group, layout.addresses, e.times(vector, 8 * LANES)), I64, lane) for lane in range(LANES)]
            lanes = e.at(group, layout.queries, e.times(vector, 4 * LANES))
            whole = self._key_dim // (2 * LANES) * (2 * LANES)
            with e.loop(0, whole, 2 * LANES) as number:
                columns = self._e.transposed([e.load(e.at(row, e.times(number, 2)), WORDS) for row in rows])
                for pair, column in enumerate(columns):
                    e.store(column, e.at(lanes, e.times(number, ROW // 2), pair * ROW))
            if whole < self._key_dim:
                ends = [e.b.bitcast(e.load(e.at(row, 2 * whole), HALVES), ir.VectorType(I32, LANES // 2)) for row in rows]
                columns = self._e.transposed([e.shuffle(each, each, range(LANES)) for each in ends])
                for pair, column in enumerate(columns[: LANES // 2]):
                    e.store(column, e.at(lanes, (whole // 2 + pair) * ROW))
        with e.loop(0, self._value_dim * VECTORS) as vector:
            e.store(e.number(0.0, VECTOR), e.at(group, layout.out), vector)

    # -- keys

    def _walk(self, table: ir.Value, kv_head: ir.Value, first: ir.Value, last: ir.Value, visit: Visit) -> None:
        """Calls visit(number, address of the key, of its value) for keys first … last − 1, numbered from 0."""
        e, size = self._e, self._call["block_size"]
        columns = e.b.sdiv(first, size), e.at(e.b.sdiv(e.at(last, -1), size), 1)
        with e.loop(*columns) as column:
            begin = e.times(column, size)
            start, stop = e.most(first, begin), e.least(last, e.at(begin, size))
            shift = e.b.sub(e.times(e.load(table, I64, column), size), begin)
            with e.loop(start, stop) as key:
                slot = e.at(key, shift)
                at = (
                    e.at(self._call[x], e.times(slot, self._call[f"{x}_token"]), e.times(kv_head, self._call[f"{x}_head"]))
                    for x in "kv"
                )
                visit(e.b.sub(key, first), *at)

    def _expect(self, number: ir.Value, key: ir.Value, value: ir.Value) -> None:
        for at, dim in ((key, self._key_dim), (value, self._value_dim)):
            for line in range(0, 2 * dim, LINE):
                self._e.prefetch(self._e.at(at, line))

    def _copy(self, number: ir.Value, key: ir.Value, value: ir.Value) -> None:
        e, layout = self._e, self._layout
        for at, dim, offset in ((key, self._key_dim, layout.keys), (value, self._value_dim, layout.values)):
            to = e.at(self._own(offset), e.times(number, 2 * dim))
            for chunk in range(dim // LANES):
                e.store(e.load(at, HALVES, chunk), to, chunk)

    def _bring(self, table: ir.Value, kv_head: ir.Value, begin: ir.Value, stop: ir.Value) -> None:
        """Copies a tile's keys; values of two neighbours are interleaved to words, behind the last one stand zeros."""
        e, layout = self._e, self._layout
        self._walk(table, kv_head, begin, stop, self._copy)
        chunks = self._value_dim // LANES
        count = e.b.sub(stop, begin)
        end = e.b.and_(e.at(count, ABREAST - 1), e.integer(-ABREAST))
        with e.loop(e.times(count, chunks), e.times(end, chunks)) as chunk:
            e.store(ir.Constant(HALVES, [0] * LANES), self._own(layout.values), chunk)
        with e.loop(0, end, 2) as key:
            rows = e.at(self._own(layout.values), e.times(key, 2 * self._value_dim))
            for chunk in range(chunks):
                low, high = (e.b.zext(e.load(rows, HALVES, chunk + i * chunks), WORDS) for i in range(2))
                word = e.b.or_(low, e.b.shl(high, ir.Constant(WORDS, [16] * LANES)))
                e.store(word, e.at(self._own(layout.value_words), e.times(key, 2 * self._value_dim)), chunk)

    # -- results

    def _finish(self, group: ir.Value, left: ir.Value) -> None:
        """out and lse of a group; (0, −inf) where a query saw nothing."""
        e, layout = self._e, self._layout
        with e.loop(0, VECTORS) as vector:
            highest, sums = (e.load(e.at(group, offset), VECTOR, vector) for offset in (layout.highest, layout.sums))
            empty = e.b.icmp_signed("==", e.load(e.at(group, layout.visible), WORDS, vector), ir.Constant(WORDS, [0] * LANES))
            base = e.b.fmul(self._math.base(highest), e.number(math.log(2), VECTOR))
            e.store(base, self._own(layout.shrinks), vector)
            factor = e.b.select(empty, e.number(0.0, VECTOR), e.b.fdiv(e.number(1.0, VECTOR), sums))
            places = e.at(group, layout.places, e.times(vector, 8 * LANES))
            lanes = e.b.sub(left, e.times(vector, LANES))
            with e.loop(0, self._value_dim, LANES) as first:
                at = e.at(group, layout.out, e.times(first, ROW), e.times(vector, 4 * LANES))
                columns = [e.b.fmul(e.load(e.at(at, i * ROW)), factor) for i in range(LANES)]
                for lane, row in enumerate(self._e.transposed(columns)):
                    with e.b.if_then(e.b.icmp_signed("<", e.integer(lane), lanes)):
                        place = e.times(e.load(places, I64, lane), self._value_dim)
                        e.store(row, e.at(self._call["out"], e.times(e.at(place, first), 4)))
        with e.loop(0, e.least(left, e.integer(GROUP))) as lane:
            logarithm = e.intrinsic("log", e.load(e.at(group, layout.sums), F32, lane))
            total = e.b.fadd(e.load(self._own(layout.shrinks), F32, lane), logarithm)
            e.store(total, self._call["lse"], e.load(e.at(group, layout.places), I64, lane))
