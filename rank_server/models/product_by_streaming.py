"""A program for products of few rows with bf16 matrices in row-major order.

A matrix is read once, as fast as memory gives it: a thread takes a range of output features, BLOCK at a time, and asks for the
next block while it reads this one. The numbers of a row of the matrix and of one of x are multiplied in the order in which they
stand, lane by lane, and the lanes added up at the end: a result depends neither on the threads nor on the other rows of x.
"""

from llvmlite import ir

from rank_server.compiled.avx512 import add_products
from rank_server.compiled.emitter import HALVES, LANES, VECTOR
from rank_server.models.product_program import ProductProgram

BLOCK = LANES
"""Output features at a time; their sums fill a vector."""
ROWS = 4
"""Rows of x at a time, where there are so many: then with as many features, so that their sums fit into registers."""


class StreamingProgram(ProductProgram):
    """gated, team: see `ProductProgram`; pairs: whether the processor multiplies bf16 numbers, otherwise they are turned into
    fp32 before."""

    def __init__(self, gated: bool, team: bool, pairs: bool) -> None:
        super().__init__("streaming", gated, team)
        self._pairs, self._width = pairs, 2 * LANES if pairs else LANES
        e = self._e
        self._sums = {name: e.array(ROWS * BLOCK) for name in self._matrices}
        begin, end = self._share(self._quotient(self._call["features"], BLOCK))
        with e.loop(begin, end) as block:
            more = e.b.icmp_signed("<", e.at(block, 1), end)
            whole = e.times(e.b.sdiv(self._call["rows"], e.integer(ROWS)), ROWS)
            with e.loop(0, whole, ROWS) as row:
                self._multiply(block, row, ROWS, ROWS, more)
            with e.loop(whole, self._call["rows"]) as row:
                self._multiply(block, row, 1, BLOCK, more)

    def _multiply(self, block: ir.Value, row: ir.Value, rows: int, features: int, more: ir.Value) -> None:
        """Results of a block for so many rows of x; at the first ones, asks for the next block if there is one."""
        e = self._e
        first = e.times(block, BLOCK)
        ahead = e.b.select(e.b.and_(more, e.b.icmp_signed("==", row, e.integer(0))), e.integer(BLOCK), e.integer(0))
        inputs = [e.at(self._call["x"], e.times(e.at(row, index), self._call["x_stride"])) for index in range(rows)]
        for name in self._matrices:
            distance = e.times(ahead, self._call[f"{name}_stride"])
            with e.loop(0, BLOCK, features) as feature:
                weights = [self._weight_row(name, e.at(first, feature, index)) for index in range(features)]
                for index, total in enumerate(self._dots(weights, inputs, distance)):
                    e.store(total, self._sums[name], e.at(feature, index // rows, index % rows * BLOCK))
        with e.loop(0, rows) as index:
            sums = {
                name: e.across_each([e.load(at, VECTOR, e.at(e.times(index, BLOCK), each)) for each in range(BLOCK)])
                for name, at in self._sums.items()
            }
            self._write(sums["weight"], sums.get("gate"), first, e.at(row, index))

    def _dots(self, weights: list[ir.Value], inputs: list[ir.Value], distance: ir.Value) -> list[ir.Value]:
        """Products of all pairs of a row of W and one of x, by weights then inputs; their lanes are still to be added up."""
        e, count = self._e, self._call["inputs"]
        sums = [e.variable(e.number(0.0, VECTOR)) for _ in range(len(weights) * len(inputs))]
        whole = e.times(e.b.sdiv(count, e.integer(self._width)), self._width)
        with e.loop(0, whole, self._width) as k:
            for weight in weights:
                e.prefetch(e.at(weight, distance, e.times(k, 2)))
            self._add(sums, weights, inputs, k, None)
        rest = e.b.sub(count, whole)
        with e.b.if_then(e.b.icmp_signed(">", rest, e.integer(0))):
            self._add(sums, weights, inputs, whole, rest)
        return [e.get(each) for each in sums]

    def _add(
        self, sums: list[ir.Value], weights: list[ir.Value], inputs: list[ir.Value], k: ir.Value, count: ir.Value | None
    ) -> None:
        e = self._e
        xs = [self._numbers(each, k, count) for each in inputs]
        for index, weight in enumerate(weights):
            w = self._numbers(weight, k, count)
            for total, x in zip(sums[index * len(xs) :], xs, strict=False):
                before = e.get(total)
                e.set(total, add_products(e, before, w, x) if self._pairs else e.sum_of_products(w, x, before))

    def _numbers(self, row: ir.Value, k: ir.Value, count: ir.Value | None) -> ir.Value:
        """A vector of pairs of bf16 numbers, or one of fp32 numbers, from input k on; count: as of `_words`."""
        if self._pairs:
            return self._words(row, k, count)
        e = self._e
        at = e.at(row, e.times(k, 2))
        return e.widened(e.load(at, HALVES) if count is None else e.load_first(count, at, HALVES))
