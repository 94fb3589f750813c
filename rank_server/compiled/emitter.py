"""Writing a program for the processor at hand: LLVM instructions by way of llvmlite, which `translation` translates.

The programs are small and written out in vectors of 16 fp32 numbers, which LLVM splits where registers are narrower; so
translating one takes a fraction of a second. Addresses are 64-bit integers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

LANES = 16
LINE = 64
"""Bytes of a cache line, on most processors; on others some lines are asked for in vain or not at all."""


class _Bfloat16(ir.Type):
    """A type of LLVM that llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


BF16 = _Bfloat16()
I16, I32, I64, F32, F64 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
VECTOR, HALVES, WORDS = (ir.VectorType(each, LANES) for each in (F32, I16, I32))
POINTER = ir.PointerType()
_BYTES = {I16: 2, I32: 4, I64: 8, F32: 4, F64: 8, VECTOR: 64, HALVES: 32, WORDS: 64}


@cache
def rounds_to_bf16() -> bool:
    """Whether this processor has an instruction for that, which takes 16 numbers at a time."""
    return bool(llvm.get_host_cpu_features().get("avx512bf16", False))


class Emitter:
    """Appends instructions to a function of one address. Python's own loops repeat instructions, `loop` is one at run time."""

    def __init__(self, name: str) -> None:
        self.module = ir.Module(name)
        self.module.triple = llvm.get_process_triple()
        self.function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [I64]), name)
        self._variables = ir.IRBuilder(self.function.append_basic_block("variables"))
        self.b = ir.IRBuilder(self.function.append_basic_block("body"))

    def source(self) -> str:
        """The finished program."""
        self.b.ret_void()
        self._variables.branch(self.function.blocks[1])
        return str(self.module)

    # -- numbers

    def integer(self, value: int) -> ir.Value:
        """A 64-bit constant."""
        return ir.Constant(I64, value)

    def number(self, value: float, like: ir.Type = F32) -> ir.Value:
        """An fp32 constant, in all lanes of a vector."""
        one = ir.Constant(F32, value)
        return ir.Constant(VECTOR, [one] * LANES) if like == VECTOR else one

    def splat(self, x: ir.Value, lanes: int = LANES) -> ir.Value:
        """A scalar in all lanes."""
        nothing = ir.Constant(ir.VectorType(x.type, lanes), ir.Undefined)
        first = self.b.insert_element(nothing, x, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))

    def shuffle(self, x: ir.Value, y: ir.Value, lanes: Sequence[int]) -> ir.Value:
        """Lanes of x (0 …) and y (LANES …)."""
        return self.b.shuffle_vector(x, y, ir.Constant(WORDS, list(lanes)))

    def lanes_below(self, count: ir.Value, lanes: int = LANES) -> ir.Value:
        """Mask of the first `count` lanes."""
        numbers = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
        return self.b.icmp_signed("<", numbers, self.splat(self.b.trunc(count, I32), lanes))

    def sum_of_products(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """x·y + z, in one rounding where the processor can."""
        return self.intrinsic("fmuladd", x, y, z)

    def widened(self, halves: ir.Value) -> ir.Value:
        """LANES numbers of bf16 in HALVES → fp32."""
        words = self.b.zext(halves, WORDS)
        return self.b.bitcast(self.b.shl(words, ir.Constant(WORDS, [16] * LANES)), VECTOR)

    def rounded(self, x: ir.Value) -> ir.Value:
        """A vector in bf16, to nearest, ties to even, as HALVES; NaN stays NaN."""
        if rounds_to_bf16():
            return self.b.bitcast(self.b.fptrunc(x, ir.VectorType(BF16, LANES)), HALVES)
        # LLVM would call a function of the compiler's library for each number, which a process need not have.
        sixteen, one, below_half, quiet = (ir.Constant(WORDS, [each] * LANES) for each in (16, 1, 0x7FFF, 0x400000))
        bits = self.b.bitcast(x, WORDS)
        up = self.b.add(self.b.add(bits, below_half), self.b.and_(self.b.lshr(bits, sixteen), one))
        bits = self.b.select(self.b.fcmp_unordered("uno", x, x), self.b.or_(bits, quiet), up)
        return self.b.trunc(self.b.lshr(bits, sixteen), HALVES)

    def intrinsic(self, name: str, *arguments: ir.Value) -> ir.Value:
        """An operation of LLVM on fp32, all arguments and the result of one type."""
        kind = arguments[0].type
        name = f"llvm.{name}.{f'v{LANES}f32' if kind == VECTOR else 'f32'}"
        signature = ir.FunctionType(kind, [kind] * len(arguments))
        return self.b.call(self.module.globals.get(name) or ir.Function(self.module, signature, name), arguments)

    def least(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The lesser of two integers."""
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def most(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The greater of two integers."""
        return self.b.select(self.b.icmp_signed(">", x, y), x, y)

    def greatest(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """x where it is above y, else y: a NaN in x is passed over."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def across(self, x: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """All lanes of a vector combined to a scalar."""
        for distance in (8, 4, 2, 1):
            x = combine(self.shuffle(x, x, [(lane + distance) % LANES for lane in range(LANES)]), x)
        return self.b.extract_element(x, ir.Constant(I32, 0))

    def across_each(self, vectors: list[ir.Value]) -> ir.Value:
        """Sums over the lanes of LANES vectors, one a lane: pairs of vectors are folded into one, four times."""
        distance = LANES // 2
        while distance:
            # Lane l of x and lane l + distance add up in lane l of the result, those of y in lane l + distance.
            low = [lane & distance == 0 for lane in range(LANES)]
            kept = [lane if low[lane] else LANES + lane for lane in range(LANES)]
            moved = [lane + distance if low[lane] else LANES + lane - distance for lane in range(LANES)]
            half = len(vectors) // 2
            pairs = zip(vectors[:half], vectors[half:], strict=True)
            vectors = [self.b.fadd(self.shuffle(x, y, kept), self.shuffle(x, y, moved)) for x, y in pairs]
            distance //= 2
        return vectors[0]

    def transposed(self, vectors: Sequence[ir.Value]) -> list[ir.Value]:
        """Lane i of the j-th of LANES vectors → lane j of the i-th: blocks beside the diagonal change places, four times."""
        rows = list(vectors)
        for distance in (8, 4, 2, 1):
            low = [lane & distance == 0 for lane in range(LANES)]
            upper = [lane if low[lane] else LANES + lane - distance for lane in range(LANES)]
            lower = [lane + distance if low[lane] else LANES + lane for lane in range(LANES)]
            for i in (lane for lane in range(LANES) if low[lane]):
                x, y = rows[i], rows[i + distance]
                rows[i], rows[i + distance] = self.shuffle(x, y, upper), self.shuffle(x, y, lower)
        return rows

    # -- memory

    def fields(self, record: "np.dtype[np.void]", address: ir.Value | None = None) -> dict[str, ir.Value]:
        """Fields (int64, float64) of the record at an address (default: the one that the function is given), by name."""
        kinds = {np.dtype(np.int64): I64, np.dtype(np.float64): F64}
        argument = self.function.args[0] if address is None else address
        places = ((name, kind, place) for name, (kind, place, *_) in (record.fields or {}).items())
        return {name: self.load(self.at(argument, place), kinds[kind]) for name, kind, place in places}

    def at(self, base: ir.Value, *terms: ir.Value | int) -> ir.Value:
        """base + the terms."""
        for term in terms:
            base = self.b.add(base, self.integer(term) if isinstance(term, int) else term)
        return base

    def times(self, *factors: ir.Value | int) -> ir.Value:
        """The product of the factors."""
        product, *others = [self.integer(each) if isinstance(each, int) else each for each in factors]
        for other in others:
            product = self.b.mul(product, other)
        return product

    def load(self, address: ir.Value, kind: ir.Type = VECTOR, index: ir.Value | int = 0) -> ir.Value:
        """Element `index` of an array."""
        at = self.at(address, self.times(index, _BYTES[kind]))
        return self.b.load(self.b.inttoptr(at, POINTER), align=_BYTES.get(getattr(kind, "element", kind)), typ=kind)

    def store(self, value: ir.Value, address: ir.Value, index: ir.Value | int = 0) -> None:
        """Into element `index` of an array."""
        kind = value.type
        at = self.at(address, self.times(index, _BYTES[kind]))
        self.b.store(value, self.b.inttoptr(at, POINTER), align=_BYTES[getattr(kind, "element", kind)])

    def load_first(self, count: ir.Value, address: ir.Value, kind: ir.Type) -> ir.Value:
        """The first `count` elements of a vector, 0 in the others, which may lie in nobody's memory."""
        zeros = ir.Constant(kind, None)
        return self._masked("load", kind, kind, count, address, [], [zeros])

    def store_first(self, count: ir.Value, value: ir.Value, address: ir.Value, index: int = 0) -> None:
        """The first `count` elements of a vector into element `index` of an array of such; what lies behind them stays."""
        self._masked("store", value.type, ir.VoidType(), count, self.at(address, index * _BYTES[value.type]), [value], [])

    def _masked(
        self,
        what: str,
        kind: ir.Type,
        result: ir.Type,
        count: ir.Value,
        address: ir.Value,
        before: list[ir.Value],
        after: list[ir.Value],
    ) -> ir.Value:
        element = kind.element
        align, mask = ir.Constant(I32, _BYTES[element]), self.lanes_below(count, kind.count)
        arguments = [*before, self.b.inttoptr(address, POINTER), align, mask, *after]
        name = f"llvm.masked.{what}.v{kind.count}{'f' if element == F32 else 'i'}{8 * _BYTES[element]}.p0"
        signature = ir.FunctionType(result, [each.type for each in arguments])
        return self.b.call(self.module.globals.get(name) or ir.Function(self.module, signature, name), arguments)

    def prefetch(self, address: ir.Value) -> None:
        """Asks for a cache line that will be read, into the second cache, where more requests can wait; never fails."""
        hints = (ir.Constant(I32, each) for each in (0, 2, 1))
        self.call("llvm.prefetch.p0", ir.VoidType(), self.b.inttoptr(address, POINTER), *hints)

    # -- control

    def variable(self, initial: ir.Value) -> ir.Value:
        """Something to `get` and `set`."""
        place = self._variables.alloca(initial.type)
        self.b.store(initial, place)
        return place

    def array(self, vectors: int) -> ir.Value:
        """Address of memory for so many vectors, which holds anything."""
        return self._variables.ptrtoint(self._variables.alloca(ir.ArrayType(VECTOR, vectors)), I64)

    def get(self, variable: ir.Value) -> ir.Value:
        """Its present value."""
        return self.b.load(variable, typ=variable.allocated_type)

    def set(self, variable: ir.Value, value: ir.Value) -> None:
        """Its next value."""
        self.b.store(value, variable)

    @contextmanager
    def loop(self, first: ir.Value | int, last: ir.Value | int, step: ir.Value | int = 1) -> Iterator[ir.Value]:
        """Body of a loop over first, first + step, … < last; yields the counter."""
        first, last, step = (self.integer(each) if isinstance(each, int) else each for each in (first, last, step))
        head, body, end = (self.function.append_basic_block(name) for name in ("head", "body", "end"))
        before = self.b.block
        self.b.branch(head)
        self.b.position_at_end(head)
        counter = self.b.phi(I64)
        counter.add_incoming(first, before)
        self.b.cbranch(self.b.icmp_signed("<", counter, last), body, end)
        self.b.position_at_end(body)
        yield counter
        counter.add_incoming(self.b.add(counter, step), self.b.block)
        self.b.branch(head)
        self.b.position_at_end(end)

    @contextmanager
    def shared_loop(self, counter: ir.Value, last: ir.Value) -> Iterator[ir.Value]:
        """Body of a loop that threads share: 0, 1, … < last go to whoever asks first; counter: address of an integer, 0."""
        head, body, end = (self.function.append_basic_block(name) for name in ("head", "body", "end"))
        self.b.branch(head)
        self.b.position_at_end(head)
        number = self.b.atomic_rmw("add", self.b.inttoptr(counter, I64.as_pointer()), self.integer(1), "monotonic")
        self.b.cbranch(self.b.icmp_signed("<", number, last), body, end)
        self.b.position_at_end(body)
        yield number
        self.b.branch(head)
        self.b.position_at_end(end)

    def call(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        """Result of an operation of LLVM, or of a C function of this process, which no load or store is moved across."""
        kind = ir.FunctionType(result, [each.type for each in arguments])
        return self.b.call(self.module.globals.get(name) or ir.Function(self.module, kind, name), arguments)
