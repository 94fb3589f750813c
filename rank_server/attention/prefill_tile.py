"""What a prefill program (see `prefill_program`) computes for a group of queries and a tile of keys.

Each query is a lane of VECTORS vectors. Keys lie as they are stored, values with two neighbours' numbers side by side in words.
"""

import math

from llvmlite import ir

from rank_server.compiled.avx512 import ONES, add_products, times_power_of_two, words
from rank_server.compiled.emitter import I32, LANES, LINE, VECTOR, WORDS, Emitter

TILE = 64
"""Keys between two looks at the highest score."""
VECTORS = 3
GROUP = VECTORS * LANES
"""Queries (of one head each) that are attended at a time: with ABREAST numbers against them the registers are full."""
GROUPS = 4
"""Groups for which keys are brought together."""
ABREAST = 8
"""Keys or elements of values that are multiplied at a time; divides TILE and LANES."""
ROW = 4 * GROUP
"""Bytes of a number or a word per query."""
UNROLLED = 2
"""Words of a key between two branches; divides LANES / 2."""
POWER = (0.009582845019177822, 0.0559064435184473, 0.2402409889618442, 0.6931241903162472, 1.0)
"""2^r for |r| ≤ 1/2, with a relative error below 3e-6: a thousandth of what rounding to bf16 costs."""


class Layout:
    """Offsets in the memory of a thread; those of groups are relative to each of the GROUPS groups at its beginning."""

    def __init__(self, key_dim: int, value_dim: int) -> None:
        self.size = 0
        self.highest, self.sums, self.visible = (self._take(ROW) for _ in range(3))
        self.addresses, self.places = (self._take(2 * ROW) for _ in range(2))
        self.most = self._take(LINE)
        self.queries = self._take(key_dim // 2 * ROW)
        self.out = self._take(value_dim * ROW)
        self.group_size = self.size
        self.size *= GROUPS
        self.shrinks = self._take(ROW)
        self.scores = self._take(TILE * ROW)
        self.keys = self._take(TILE * key_dim * 2)
        self.values, self.value_words = (self._take(TILE * value_dim * 2) for _ in range(2))

    def _take(self, size: int) -> int:
        self.size += size
        return self.size - size


class TileMath:
    """Emits the arithmetic. scratch: address of the thread's memory; binary_scale: vector of scale · log2 e."""

    def __init__(self, e: Emitter, scratch: ir.Value, binary_scale: ir.Value, key_dim: int, value_dim: int) -> None:
        self._e, self._scratch, self._binary_scale = e, scratch, binary_scale
        self._key_dim, self._value_dim = key_dim, value_dim
        self._layout = Layout(key_dim, value_dim)

    def attend(self, group: ir.Value, vectors: int, begin: ir.Value, keys: ir.Value) -> None:
        """Adds the first `keys` keys of the tile to the sums of a group, of which `vectors` vectors are in use.

        keys: a multiple of ABREAST; begin: number of the first one. What a query does not see may be anything, but for values
        that no query of the block sees, which are finite.
        """
        self._score(group, vectors, begin, keys)
        self._soften(group, vectors, keys)
        self._add_values(group, vectors, keys)

    def base(self, highest: ir.Value) -> ir.Value:
        """Binary logarithm of what weights are relative to, from the highest score; any number where there is none yet."""
        return self._e.b.fmul(self._reference(highest), self._binary_scale)

    def _reference(self, highest: ir.Value) -> ir.Value:
        """The score that weights are relative to."""
        e = self._e
        none = e.b.fcmp_ordered("==", highest, e.number(-math.inf, VECTOR))
        return e.b.select(none, e.number(0.0, VECTOR), highest)

    def _score(self, group: ir.Value, vectors: int, begin: ir.Value, keys: ir.Value) -> None:
        """Scores, not scaled yet, −inf where a query does not see the key; `shrinks` and `highest` for what they bring."""
        e, layout = self._e, self._layout
        visible = [e.load(e.at(group, layout.visible), WORDS, i) for i in range(vectors)]
        before = [e.load(e.at(group, layout.highest), VECTOR, i) for i in range(vectors)]
        tops = [e.variable(each) for each in before]
        with e.loop(0, keys, ABREAST) as first:
            block = e.at(self._scratch, self._layout.keys, e.times(first, 2 * self._key_dim))
            sums = [[e.variable(e.number(0.0, VECTOR)) for _ in range(vectors)] for _ in range(ABREAST)]
            with e.loop(0, self._key_dim // 2, UNROLLED) as word:
                for offset in range(UNROLLED):
                    query = e.at(group, layout.queries + offset * ROW, e.times(word, ROW))
                    queries = [e.load(query, WORDS, i) for i in range(vectors)]
                    for key, totals in enumerate(sums):
                        number = e.splat(e.load(e.at(block, 2 * key * self._key_dim + 4 * offset), I32, word))
                        for total, each in zip(totals, queries, strict=True):
                            e.set(total, add_products(e, e.get(total), each, number))
            for key, totals in enumerate(sums):
                at = e.at(self._scratch, layout.scores, e.times(e.at(first, key), ROW))
                number = e.splat(e.b.trunc(e.at(begin, first, key), I32))
                for i, total in enumerate(totals):
                    seen = e.b.icmp_signed("<", number, visible[i])
                    score = e.b.select(seen, e.get(total), e.number(-math.inf, VECTOR))
                    e.store(score, at, i)
                    e.set(tops[i], e.greatest(score, e.get(tops[i])))
        for i, top in enumerate(tops):
            shrink = self._weight(before[i], self._reference(e.get(top)))
            e.store(shrink, e.at(self._scratch, layout.shrinks), i)
            e.store(e.get(top), e.at(group, layout.highest), i)

    def _weight(self, score: ir.Value, reference: ir.Value) -> ir.Value:
        """2^((score − reference) · binary scale), score ≤ reference: 1 of the reference itself, 0 of −inf, NaN of NaN.

        Scaled scores of 2^31 and more are rounded to multiples of 256: if those were subtracted, the highest one's own weight
        could be 0 or infinite.
        """
        e = self._e
        x = e.b.fmul(e.b.fsub(score, reference), self._binary_scale)
        n = e.intrinsic("roundeven", x)
        # Of x = −inf, r and p are NaN, and NaN · 2^−inf is 0.
        r = e.b.fsub(x, n)
        p = e.number(POWER[0], VECTOR)
        for c in POWER[1:]:
            p = e.sum_of_products(p, r, e.number(c, VECTOR))
        return times_power_of_two(e, p, n)

    def _soften(self, group: ir.Value, vectors: int, keys: ir.Value) -> None:
        """Scores → rounded weights of two neighbours in a word; in the place of scores, in front of those not read yet."""
        e, layout = self._e, self._layout
        scores = e.at(self._scratch, layout.scores)
        references = [self._reference(e.load(e.at(group, layout.highest), VECTOR, i)) for i in range(vectors)]
        sums = []
        for i in range(vectors):
            shrink = e.load(e.at(self._scratch, layout.shrinks), VECTOR, i)
            sums.append(e.variable(e.b.fmul(e.load(e.at(group, layout.sums), VECTOR, i), shrink)))
        ones = ir.Constant(WORDS, [ONES] * LANES)
        with e.loop(0, keys, 2) as key:
            for i in range(vectors):
                both = []
                for neighbour in range(2):
                    score = e.load(e.at(scores, e.times(key, ROW), neighbour * ROW), VECTOR, i)
                    both.append(self._weight(score, references[i]))
                word = words(e, *both)
                e.set(sums[i], add_products(e, e.get(sums[i]), word, ones))
                e.store(word, e.at(scores, e.times(key, ROW // 2)), i)
        for i, total in enumerate(sums):
            e.store(e.get(total), e.at(group, layout.sums), i)

    def _add_values(self, group: ir.Value, vectors: int, keys: ir.Value) -> None:
        e, layout = self._e, self._layout
        shrinks = [e.load(e.at(self._scratch, layout.shrinks), VECTOR, i) for i in range(vectors)]
        with e.loop(0, self._value_dim, ABREAST) as first:
            out = e.at(group, layout.out, e.times(first, ROW))
            sums = []
            for element in range(ABREAST):
                at = e.at(out, element * ROW)
                sums.append([e.variable(e.b.fmul(e.load(at, VECTOR, i), shrinks[i])) for i in range(vectors)])
            with e.loop(0, e.b.sdiv(keys, e.integer(2))) as pair:
                weight = e.at(self._scratch, layout.scores, e.times(pair, ROW))
                weights = [e.load(weight, WORDS, i) for i in range(vectors)]
                values = e.at(self._scratch, layout.value_words, e.times(e.at(e.times(pair, self._value_dim), first), 4))
                for element, totals in enumerate(sums):
                    number = e.splat(e.load(values, I32, element))
                    for total, each in zip(totals, weights, strict=True):
                        e.set(total, add_products(e, e.get(total), each, number))
            for element, totals in enumerate(sums):
                for i, total in enumerate(totals):
                    e.store(e.get(total), e.at(out, element * ROW), i)
