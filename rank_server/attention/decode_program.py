"""A program for decode attention over a paged bf16 cache: see `cpu_decode` for what it is given.

Keys and values are read once for all query heads of their KV head, turned into fp32 in registers, and asked for ahead of time.
A thread takes its keys a tile at a time: scores, softmax weights relative to the highest score so far, weighted values.
"""

import numpy as np
from llvmlite import ir

from rank_server.compiled.bfloat import widened
from rank_server.compiled.emitter import F32, I64, LANES, LINE, VECTOR, Emitter
from rank_server.compiled.exponential import exponential
from rank_server.compiled.team import thread_of
from rank_server.compiled.translation import Compiled, translate

TILE = 64
"""Keys between two looks at the highest score."""
CHAINS = 8
"""Sums that are kept in registers at a time."""
STEP = np.dtype(
    [
        ("scratch", np.int64),  # address of fp32 [threads, scratch_floats]
        ("scratch_floats", np.int64),
        ("partial", np.int64),  # address of fp32 [N, h, partial_floats]
        ("tokens", np.int64),  # addresses of int64 arrays as in `cpu_decode.Queries`
        ("tables", np.int64),
        ("ranges", np.int64),
        ("first_range", np.int64),
        ("num_rows", np.int64),  # R
        ("num_keys", np.int64),
        ("kv_heads", np.int64),
    ]
)
"""What the calls of a step's layers have in common."""
ARGUMENT = np.dtype(
    [
        ("step", np.int64),  # address of a STEP
        ("q", np.int64),  # address of [T, h, D], fp32 or bf16, heads in one piece
        ("q_stride", np.int64),  # bytes from a token to the next one
        ("k_cache", np.int64),  # address of bf16 [num_blocks, B, hk, D]
        ("v_cache", np.int64),  # the same
        ("out", np.int64),  # address of fp32 [T, h, D]
        ("lse", np.int64),  # address of fp32 [T, h]
        ("block_size", np.int64),
        ("scale", np.float64),
    ]
)
"""What the program is given the address of."""
RANGE_FIELDS = 4


def scratch_floats(kv_heads: int, share: int, head_dim: int) -> int:
    """Memory of a thread: scaled queries, sums of a head, scores, shrinking factors, places of two tiles (64 bits each)."""
    return share * (kv_heads * head_dim + LANES * LANES + TILE + LANES) + 4 * TILE


def partial_floats(head_dim: int) -> int:
    """Of one head of a range: the weighted values, then the highest score and the sum of the weights, padded."""
    return head_dim + LANES


class DecodeProgram:
    """share: query heads of a KV head; head_dim: a multiple of LANES; team: whether OpenMP's threads will run it together;
    wide: whether queries are fp32 instead of bf16.
    """

    def __init__(self, share: int, head_dim: int, team: bool, wide: bool) -> None:
        self._share, self._dim, self._chunks, self._wide = share, head_dim, head_dim // LANES, wide
        self._e = e = Emitter("decode")
        self._call = e.fields(ARGUMENT)
        self._call |= e.fields(STEP, self._call["step"])
        self._scale = e.splat(e.b.fptrunc(self._call["scale"], F32))
        self._stored = e.times(self._call["kv_heads"], head_dim * 2)
        self._heads = e.times(self._call["kv_heads"], share)
        thread, size = thread_of(e, team)
        scratch = e.at(self._call["scratch"], e.times(thread, 4, self._call["scratch_floats"]))
        self._query = scratch
        self._sums = e.at(scratch, e.times(self._heads, 4 * head_dim))
        self._weights = e.at(self._sums, 4 * share * LANES * LANES)
        self._shrinks = e.at(self._weights, 4 * share * TILE)
        self._places = e.at(self._shrinks, 4 * share * LANES)
        with e.loop(0, self._call["num_rows"]) as row:
            first, last = (e.load(self._call["first_range"], I64, e.at(row, i)) for i in (0, 1))
            with e.loop(first, last) as number:
                table, begin, end, middle = self._range(number)
                whose = e.b.sdiv(e.times(middle, size), e.at(self._call["num_keys"], 1))
                with e.b.if_then(e.b.icmp_signed("==", whose, thread)):
                    _, _, end_of_row, _ = self._range(e.at(last, -1))
                    self._attend(row, number, e.at(self._call["tables"], e.times(table, 8)), begin, end, end_of_row)
        if team:
            e.call("GOMP_barrier", ir.VoidType())
        with e.loop(thread, self._call["num_rows"], size) as row:
            self._merge(row)

    def translate(self) -> Compiled:
        """Machine code for this processor."""
        return translate(self._e)

    def _partial(self, number: ir.Value, head: ir.Value) -> ir.Value:
        """Address of the partial of a head in a range."""
        e = self._e
        return e.at(self._call["partial"], e.times(e.at(e.times(number, self._heads), head), 4 * partial_floats(self._dim)))

    def _range(self, number: ir.Value) -> list[ir.Value]:
        """Fields of a range, see `cpu_decode.Queries.ranges`."""
        e = self._e
        keys = e.at(self._call["ranges"], e.times(number, 8 * RANGE_FIELDS))
        return [e.load(keys, I64, i) for i in range(RANGE_FIELDS)]

    def _attend(
        self, row: ir.Value, number: ir.Value, table: ir.Value, begin: ir.Value, end: ir.Value, end_of_row: ir.Value
    ) -> None:
        """With its last tile it asks for the keys at which the row goes on: they are most likely this thread's next range."""
        e = self._e
        token = e.load(self._call["tokens"], I64, row)
        source = e.at(self._call["q"], e.times(token, self._call["q_stride"]))
        with e.loop(0, e.times(self._heads, self._chunks)) as chunk:
            query = e.load(source, VECTOR, chunk) if self._wide else widened(e, source, chunk)
            e.store(e.b.fmul(query, self._scale), self._query, chunk)
        with e.loop(0, self._heads) as head:
            partial = self._partial(number, head)
            for chunk in range(self._chunks):
                e.store(e.number(0.0, VECTOR), partial, chunk)
            e.store(e.number(float("-inf")), partial, self._dim)
            e.store(e.number(0.0), partial, self._dim + 1)
        here, after = (e.variable(e.at(self._places, each)) for each in (0, 8 * TILE))
        self._locate(e.get(here), table, begin, e.least(e.at(begin, TILE), end))
        with e.loop(begin, end, TILE) as first:
            last = e.least(e.at(first, TILE), end)
            count, places, next_places = e.b.sub(last, first), e.get(here), e.get(after)
            self._locate(next_places, table, last, e.least(e.at(last, TILE), end_of_row))
            with e.loop(0, self._call["kv_heads"]) as kv_head:
                self._score(kv_head, places, next_places, count)
                with e.loop(0, self._share) as member:
                    self._soften(self._partial(number, e.at(e.times(kv_head, self._share), member)), member, count)
                self._add_values(number, kv_head, places, count)
            e.set(here, next_places)
            e.set(after, places)

    def _locate(self, places: ir.Value, table: ir.Value, first: ir.Value, last: ir.Value) -> None:
        """Rows of the cache where keys first … last − 1 lie. What stands in `places` behind them names rows of other keys."""
        e = self._e
        size = self._call["block_size"]
        column = e.variable(e.b.sdiv(first, size))
        offset = e.variable(e.b.srem(first, size))
        with e.loop(0, e.b.sub(last, first)) as j:
            block = e.load(table, I64, e.get(column))
            e.store(e.at(e.times(block, size), e.get(offset)), places, j)
            following = e.at(e.get(offset), 1)
            ends = e.b.icmp_signed("==", following, size)
            e.set(offset, e.b.select(ends, e.integer(0), following))
            e.set(column, e.b.select(ends, e.at(e.get(column), 1), e.get(column)))

    def _stored_at(self, cache: str, places: ir.Value, j: ir.Value, kv_head: ir.Value) -> ir.Value:
        e = self._e
        place = e.load(places, I64, j)
        return e.at(self._call[cache], e.times(place, self._stored), e.times(kv_head, 2 * self._dim))

    def _score(self, kv_head: ir.Value, places: ir.Value, next_places: ir.Value, count: ir.Value) -> None:
        """Scores of a tile's keys, LANES at a time; asks for the tile's values and for the keys of the next one."""
        e = self._e
        query = e.at(self._query, e.times(kv_head, 4 * self._share * self._dim))
        with e.loop(0, count, LANES) as first:
            block = e.least(e.b.sub(count, first), e.integer(LANES))
            with e.loop(0, block) as j:
                key = e.at(first, j)
                wanted = (
                    self._stored_at("v_cache", places, key, kv_head),
                    self._stored_at("k_cache", next_places, key, kv_head),
                )
                for each in wanted:
                    for line in range(0, 2 * self._dim, LINE):
                        e.prefetch(e.at(each, line))
                keys_at = self._stored_at("k_cache", places, key, kv_head)
                keys = [widened(e, keys_at, chunk) for chunk in range(self._chunks)]
                for member in range(self._share):
                    total = None
                    for chunk, part in enumerate(keys):
                        x = e.load(query, VECTOR, member * self._chunks + chunk)
                        total = e.b.fmul(x, part) if total is None else e.sum_of_products(x, part, total)
                    e.store(total, self._sums, e.at(j, member * LANES))
            with e.loop(0, self._share) as member:
                sums = [e.load(self._sums, VECTOR, e.at(e.times(member, LANES), j)) for j in range(LANES)]
                scores = e.b.select(e.lanes_below(block), e.across_each(sums), e.number(float("-inf"), VECTOR))
                e.store(scores, e.at(self._weights, e.times(member, 4 * TILE), e.times(first, 4)))

    def _soften(self, partial: ir.Value, member: ir.Value, count: ir.Value) -> None:
        """Scores of a tile → weights relative to the highest score so far, which is kept, as is the sum of the weights."""
        e = self._e
        weights = e.at(self._weights, e.times(member, 4 * TILE))
        before = e.load(partial, F32, self._dim)
        top = e.variable(e.splat(before))
        with e.loop(0, count, LANES) as first:
            e.set(top, e.greatest(e.load(e.at(weights, e.times(first, 4))), e.get(top)))
        highest = e.across(e.get(top), e.greatest)
        base, total = e.splat(highest), e.variable(e.number(0.0, VECTOR))
        with e.loop(0, count, LANES) as first:
            at = e.at(weights, e.times(first, 4))
            weight = exponential(e, e.b.fsub(e.load(at), base))
            weight = e.b.select(e.lanes_below(e.b.sub(count, first)), weight, e.number(0.0, VECTOR))
            e.store(weight, at)
            e.set(total, e.b.fadd(e.get(total), weight))
        raised = e.b.fcmp_ordered(">", highest, before)
        shrink = e.b.select(raised, exponential(e, e.b.fsub(before, highest)), e.number(1.0))
        e.store(highest, partial, self._dim)
        sum_before = e.load(partial, F32, self._dim + 1)
        e.store(e.sum_of_products(sum_before, shrink, e.across(e.get(total), e.b.fadd)), partial, self._dim + 1)
        e.store(shrink, self._shrinks, member)

    def _add_values(self, number: ir.Value, kv_head: ir.Value, places: ir.Value, count: ir.Value) -> None:
        """Shrinks what is summed and adds the tile's values, CHAINS vectors of sums at a time."""
        e = self._e
        for members in (range(first, min(first + CHAINS, self._share)) for first in range(0, self._share, CHAINS)):
            together = max(1, CHAINS // len(members))
            for chunks in (range(first, min(first + together, self._chunks)) for first in range(0, self._chunks, together)):
                sums = {}
                for member in members:
                    partial = self._partial(number, e.at(e.times(kv_head, self._share), member))
                    shrink = e.splat(e.load(self._shrinks, F32, member))
                    for chunk in chunks:
                        sums[member, chunk] = (partial, e.variable(e.b.fmul(e.load(partial, VECTOR, chunk), shrink)))
                with e.loop(0, count) as j:
                    values_at = self._stored_at("v_cache", places, j, kv_head)
                    values = {chunk: widened(e, values_at, chunk) for chunk in chunks}
                    for member in members:
                        weight = e.splat(e.load(self._weights, F32, e.at(j, member * TILE)))
                        for chunk in chunks:
                            total = sums[member, chunk][1]
                            e.set(total, e.sum_of_products(weight, values[chunk], e.get(total)))
                for (_, chunk), (partial, total) in sums.items():
                    e.store(e.get(total), partial, chunk)

    def _merge(self, row: ir.Value) -> None:
        """out and lse of a row from the partials of its ranges; (0, −inf) where there are none."""
        e = self._e
        begin, end = (e.load(self._call["first_range"], I64, e.at(row, i)) for i in (0, 1))
        token = e.load(self._call["tokens"], I64, row)
        with e.loop(0, self._heads) as head:
            top = e.variable(e.number(float("-inf")))
            with e.loop(begin, end) as number:
                e.set(top, e.greatest(e.load(self._partial(number, head), F32, self._dim), e.get(top)))
            highest = e.get(top)
            sums = [e.variable(e.number(0.0, VECTOR)) for _ in range(self._chunks)]
            total = e.variable(e.number(0.0))
            with e.loop(begin, end) as number:
                partial = self._partial(number, head)
                shrink = exponential(e, e.b.fsub(e.load(partial, F32, self._dim), highest))
                e.set(total, e.sum_of_products(shrink, e.load(partial, F32, self._dim + 1), e.get(total)))
                for chunk, each in enumerate(sums):
                    e.set(each, e.sum_of_products(e.splat(shrink), e.load(partial, VECTOR, chunk), e.get(each)))
            empty = e.b.icmp_signed("==", begin, end)
            divisor = e.b.select(empty, e.number(1.0), e.get(total))
            place = e.at(e.times(token, self._heads), head)
            out = e.at(self._call["out"], e.times(place, 4 * self._dim))
            for chunk, each in enumerate(sums):
                e.store(e.b.fdiv(e.get(each), e.splat(divisor)), out, chunk)
            logarithm = e.intrinsic("log", divisor)
            e.store(e.b.select(empty, e.number(float("-inf")), e.b.fadd(highest, logarithm)), self._call["lse"], place)
