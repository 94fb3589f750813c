"""What the programs for products with bf16 matrices have in common: see `compiled_linear` for what they are given."""

import numpy as np
from llvmlite import ir

from rank_server.compiled.emitter import HALVES, I16, LANES, WORDS, Emitter
from rank_server.compiled.exponential import sigmoid
from rank_server.compiled.team import share_of, thread_of
from rank_server.compiled.translation import Compiled, translate

ARGUMENT = np.dtype(
    [
        ("weight", np.int64),  # address of bf16 [N, K]; of this and what follows, rows are consecutive numbers
        ("weight_stride", np.int64),  # of a row, in bytes
        ("gate", np.int64),  # the same of a gate, in programs for one
        ("gate_stride", np.int64),
        ("bias", np.int64),  # address of bf16 [N]; 0: there is none
        ("features", np.int64),  # N
        ("inputs", np.int64),  # K
        ("x", np.int64),  # address of bf16 [T, K]
        ("x_stride", np.int64),
        ("other", np.int64),  # address of bf16 [T, N] that is added; 0: there is none
        ("other_stride", np.int64),
        ("out", np.int64),  # address of bf16 [T, N], contiguous
        ("rows", np.int64),  # T
        ("scratch", np.int64),  # of a `PanelProgram`: address of `scratch_bytes` for each thread
        ("chunk", np.int64),  # of a `PanelProgram`: rows of x that a thread takes at a time
    ]
)
"""What a program is given the address of."""
WORD_HALVES = ir.VectorType(I16, 2 * LANES)


class ProductProgram:
    """gated: out = silu(x·gateᵀ) · x·weightᵀ instead of x·weightᵀ + bias + other; team: whether OpenMP's threads will run it
    together. Sums are fp32, and a result is rounded once."""

    def __init__(self, name: str, gated: bool, team: bool) -> None:
        self._gated = gated
        self._matrices = ("gate", "weight") if gated else ("weight",)
        self._e = e = Emitter(name)
        self._call = e.fields(ARGUMENT)
        self._thread, self._threads = thread_of(e, team)

    def translate(self) -> Compiled:
        """Machine code for this processor."""
        return translate(self._e)

    def _share(self, items: ir.Value) -> tuple[ir.Value, ir.Value]:
        """First and last + 1 of this thread's items."""
        return share_of(self._e, items, self._thread, self._threads)

    def _quotient(self, x: ir.Value, y: ir.Value | int) -> ir.Value:
        """x / y, rounded up."""
        y = self._e.integer(y) if isinstance(y, int) else y
        return self._e.b.sdiv(self._e.at(x, y, -1), y)

    def _weight_row(self, name: str, feature: ir.Value) -> ir.Value:
        """Address of a row of a matrix; features that it doesn't have repeat its last one."""
        e = self._e
        feature = e.least(feature, e.at(self._call["features"], -1))
        return e.at(self._call[name], e.times(feature, self._call[f"{name}_stride"]))

    def _words(self, row: ir.Value, k: ir.Value, count: ir.Value | None) -> ir.Value:
        """Pairs of bf16 numbers from input k on; count: of those numbers that there are, others are 0."""
        e = self._e
        at = e.at(row, e.times(k, 2))
        return e.load(at, WORDS) if count is None else e.b.bitcast(e.load_first(count, at, WORD_HALVES), WORDS)

    def _write(self, product: ir.Value, gate: ir.Value | None, first: ir.Value, row: ir.Value) -> None:
        """Sums of LANES features of a row → results; gate: the sums that gate them."""
        e = self._e
        count = e.b.sub(self._call["features"], first)
        if gate is not None:
            product = e.b.fmul(e.b.fmul(gate, sigmoid(e, gate)), product)
        total = e.variable(product)
        if gate is None:
            for name, terms in (("bias", ()), ("other", (e.times(row, self._call["other_stride"]),))):
                with e.b.if_then(e.b.icmp_signed("!=", self._call[name], e.integer(0))):
                    more = e.load_first(count, e.at(self._call[name], *terms, e.times(first, 2)), HALVES)
                    e.set(total, e.b.fadd(e.get(total), e.widened(more)))
        out = e.at(self._call["out"], e.times(e.at(e.times(row, self._call["features"]), first), 2))
        e.store_first(count, e.rounded(e.get(total)), out)
