"""A program for products of many rows with bf16 matrices in row-major order, on processors that multiply bf16 numbers.

A thread takes output features, some vectors of them at a time: it puts their rows of the matrix into memory of its own, turned
so that a vector holds a pair of inputs of LANES features (a *panel*), and multiplies rows of x with it, whose pairs are
broadcast. All sums of some rows and a panel stay in registers. A result depends on its row of x alone.
"""

from llvmlite import ir

from rank_server.compiled.avx512 import add_products
from rank_server.compiled.emitter import I16, I32, LANES, LINE, VECTOR, WORDS
from rank_server.models.product_program import ProductProgram

UNROLLED = 4
"""Pairs of inputs in a row."""
STEP = 2 * LANES
"""Inputs that are turned at a time."""


def shape(gated: bool) -> tuple[int, int]:
    """(vectors of sums per row of x, rows of x at a time): with the 24 sums, a pair's vectors are in registers."""
    return (4, 6) if gated else (3, 8)


def features_at_a_time(gated: bool) -> int:
    """Output features of a panel, which holds them of the gate too."""
    return shape(gated)[0] * LANES // (2 if gated else 1)


def scratch_bytes(gated: bool, inputs: int) -> int:
    """Memory of a thread."""
    return -(-inputs // STEP) * STEP * shape(gated)[0] * LANES * 2


class PanelProgram(ProductProgram):
    """gated, team: see `ProductProgram`."""

    def __init__(self, gated: bool, team: bool) -> None:
        super().__init__("panels", gated, team)
        self._vectors, self._rows = shape(gated)
        self._pair_bytes = 4 * LANES * self._vectors
        e, features = self._e, features_at_a_time(gated)
        self._sums = e.array(self._vectors * self._rows)
        panel_bytes = e.times(self._quotient(self._call["inputs"], STEP), STEP // 2, self._pair_bytes)
        self._panel = e.at(self._call["scratch"], e.times(self._thread, panel_bytes))
        chunks = self._quotient(self._call["rows"], self._call["chunk"])
        begin, end = self._share(e.times(self._quotient(self._call["features"], features), chunks))
        present = e.variable(e.integer(-1))
        with e.loop(begin, end) as item:
            panel, chunk = e.b.sdiv(item, chunks), e.b.srem(item, chunks)
            first = e.times(panel, features)
            with e.b.if_then(e.b.icmp_signed("!=", panel, e.get(present))):
                self._fill(first)
                e.set(present, panel)
            start = e.times(chunk, self._call["chunk"])
            stop = e.least(e.at(start, self._call["chunk"]), self._call["rows"])
            groups = self._quotient(e.b.sub(stop, start), self._rows)
            with e.loop(0, groups) as group:
                self._expect(e.at(first, features), group, groups)
                self._multiply(first, e.at(start, e.times(group, self._rows)), stop)

    def _expect(self, first: ir.Value, part: ir.Value, parts: ir.Value) -> None:
        """Asks for a part of the next panel's rows of the matrix, which come from memory while this panel is multiplied."""
        e = self._e
        features = features_at_a_time(self._gated)
        begin, end = (e.b.sdiv(e.times(each, features), parts) for each in (part, e.at(part, 1)))
        with e.loop(begin, end) as feature:
            for name in self._matrices:
                row = self._weight_row(name, e.at(first, feature))
                with e.loop(0, e.times(self._call["inputs"], 2), LINE) as byte:
                    e.prefetch(e.at(row, byte))

    def _fill(self, first: ir.Value) -> None:
        e, inputs = self._e, self._call["inputs"]
        per_matrix = self._vectors // len(self._matrices)
        for number, name in enumerate(self._matrices):
            with e.loop(0, per_matrix) as vector:
                rows = [self._weight_row(name, e.at(first, e.times(vector, LANES), lane)) for lane in range(LANES)]
                to = e.at(self._panel, e.times(e.at(vector, number * per_matrix), 4 * LANES))
                with e.loop(0, inputs, STEP) as k:
                    columns = e.transposed([self._words(row, k, e.b.sub(inputs, k)) for row in rows])
                    for pair, column in enumerate(columns):
                        e.store(column, e.at(to, e.times(k, self._pair_bytes // 2)), pair * self._vectors)

    def _multiply(self, first: ir.Value, row: ir.Value, stop: ir.Value) -> None:
        """Results of the panel's features for `_rows` rows of x, or for those up to `stop`."""
        e, inputs = self._e, self._call["inputs"]
        numbers = (e.least(e.at(row, index), e.at(stop, -1)) for index in range(self._rows))
        xs = [e.at(self._call["x"], e.times(number, self._call["x_stride"])) for number in numbers]
        sums = [[e.variable(e.number(0.0, VECTOR)) for _ in range(self._vectors)] for _ in xs]
        pairs = e.b.sdiv(inputs, e.integer(2))
        whole = e.times(e.b.sdiv(pairs, e.integer(UNROLLED)), UNROLLED)
        with e.loop(0, whole, UNROLLED) as pair:
            for index in range(UNROLLED):
                self._add(sums, xs, e.at(pair, index), I32)
        with e.loop(whole, pairs) as pair:
            self._add(sums, xs, pair, I32)
        with e.b.if_then(e.b.icmp_signed("!=", e.b.srem(inputs, e.integer(2)), e.integer(0))):
            self._add(sums, xs, pairs, I16)
        for index, total in enumerate(each for of_row in sums for each in of_row):
            e.store(e.get(total), self._sums, index)
        gates = self._vectors // 2 if self._gated else 0
        with e.loop(row, e.least(stop, e.at(row, self._rows))) as number, e.loop(0, self._vectors - gates) as vector:
            place = e.at(e.times(e.b.sub(number, row), self._vectors), vector)
            gate = e.load(self._sums, VECTOR, place) if gates else None
            self._write(e.load(self._sums, VECTOR, e.at(place, gates)), gate, e.at(first, e.times(vector, LANES)), number)

    def _add(self, sums: list[list[ir.Value]], xs: list[ir.Value], pair: ir.Value, kind: ir.Type) -> None:
        """Adds the products of a pair of inputs, or of the first of one (kind I16)."""
        e = self._e
        at = e.at(self._panel, e.times(pair, self._pair_bytes))
        panel = [e.load(at, WORDS, index) for index in range(self._vectors)]
        for x, of_row in zip(xs, sums, strict=True):
            word = e.load(e.at(x, e.times(pair, 4)), kind)
            both = e.splat(e.b.zext(word, I32) if kind == I16 else word)
            for total, words in zip(of_row, panel, strict=True):
                e.set(total, add_products(e, e.get(total), words, both))
