"""Products with bf16 matrices on a CPU by compiled programs, over plain views of the weights.

With few rows a product is as fast as memory gives the matrix, with many as fast as the processor multiplies. Results don't
depend on the number of threads, which are those of OpenMP, nor on the other rows as long as these are not more than FEW_ROWS.
"""

import struct
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from rank_server.compiled import avx512
from rank_server.compiled.openmp import parallel
from rank_server.compiled.tape import Reads
from rank_server.compiled.team import Team
from rank_server.compiled.translation import Compiled
from rank_server.models.product_by_panels import PanelProgram, features_at_a_time, scratch_bytes
from rank_server.models.product_by_streaming import StreamingProgram
from rank_server.models.product_program import ARGUMENT

FEW_ROWS = 96
"""Rows up to which a matrix is read by streaming."""
BYTES_PER_THREAD = 64 << 10
"""A thread isn't called in for less than this of a matrix that is streamed."""
ITEMS_PER_THREAD = 8
"""Panels are dealt out with so many rows each that no thread has much more to do than another."""
_PACK = struct.Struct(f"{len(ARGUMENT.names or ())}q").pack


@dataclass(frozen=True, slots=True)
class Programs:
    """What one kind of product is computed with: plain or gated."""

    team: Team
    gated: bool
    few: Compiled
    many: Compiled | None
    """None where the processor has no products of bf16: torch's way is taken then."""

    @classmethod
    def of(cls, gated: bool, team: bool, pairs: bool) -> "Programs":
        """Compiles them; gated, team, pairs: as of `StreamingProgram`. ValueError for a team where there is none."""
        caller = Team.of(team)
        many = PanelProgram(gated, team).translate() if pairs else None
        return cls(caller, gated, StreamingProgram(gated, team, pairs).translate(), many)

    def serve(self, rows: int) -> bool:
        """Whether there is a program for so many rows."""
        return rows <= FEW_ROWS or self.many is not None

    def __call__(self, x: Tensor, matrix: "Matrix", other: Tensor | None) -> Tensor:
        """The product of x [T, K] as `ProductProgram` says, [T, N]; ValueError where shapes or dtypes don't fit."""
        (rows, width), features, inputs = x.shape, matrix.features, matrix.inputs
        if width != inputs or x.dtype != torch.bfloat16:
            raise ValueError(f"{x.dtype} rows of {width} numbers for a bfloat16 matrix of {features} × {inputs}")
        if other is not None:
            _check(other, (rows, features))
        x, other = _with_plain_rows(x), None if other is None else _with_plain_rows(other)
        out = x.new_empty(rows, features)
        threads, chunk, scratch = torch.get_num_threads(), rows, None
        if rows <= FEW_ROWS:
            program, threads = self.few, min(threads, 1 + 2 * features * inputs // BYTES_PER_THREAD)
        else:
            assert self.many is not None, "see `serve`"
            program = self.many
            panels = -(-features // features_at_a_time(self.gated))
            chunk = max(FEW_ROWS, -(-rows // -(-ITEMS_PER_THREAD * threads // max(panels, 1))))
            scratch = torch.empty(threads * scratch_bytes(self.gated, inputs), dtype=torch.uint8, device=x.device)
        argument = _PACK(
            *matrix.record,
            x.data_ptr(),
            2 * x.stride(0),
            *((0, 0) if other is None else (other.data_ptr(), 2 * other.stride(0))),
            out.data_ptr(),
            rows,
            0 if scratch is None else scratch.data_ptr(),
            chunk,
        )
        self.team.call(program, argument, threads, reads=matrix.reads)
        return out


@dataclass(frozen=True, slots=True)
class Matrix:
    """The weights of a product as its programs are given them."""

    features: int
    inputs: int
    record: tuple[int, ...]
    """The first fields of `ARGUMENT`. They hold addresses: who has this has the tensors too."""
    reads: Reads
    """Where a product begins to read, up to the last row; of a part of the columns with what lies between its rows."""

    @classmethod
    def of(cls, weight: Tensor, gate: Tensor | None = None, bias: Tensor | None = None) -> "Matrix":
        """Of W [N, K], a gate alike or none, and a bias [N] or none; ValueError where they don't fit."""
        for each, size in ((gate, weight.shape), (bias, weight.shape[:1])):
            if each is not None:
                _check(each, size)
        gates = (0, 0) if gate is None else (gate.data_ptr(), 2 * gate.stride(0))
        numbers = (weight.data_ptr(), 2 * weight.stride(0), *gates, 0 if bias is None else bias.data_ptr())
        features, inputs = weight.shape
        begins = tuple(each.data_ptr() for each in (gate, weight) if each is not None)
        return cls(features, inputs, (*numbers, features, inputs), Reads(begins, 2 * features * weight.stride(0)))


@cache
def programs(gated: bool) -> Programs:
    """Those of this process; takes some tenths of a second when they are first asked for."""
    return Programs.of(gated, team=parallel() is not None, pairs=avx512.available())


def suits(weight: Tensor) -> bool:
    """Whether the programs can read this matrix."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and (weight.stride(1) == 1 or weight.shape[1] <= 1)


@dataclass(frozen=True, slots=True)
class CompiledLinear:
    """A `Linear` of a matrix that `suits`. What is added to its sums is added in fp32."""

    weight: Tensor
    bias: Tensor | None
    programs: Programs
    matrix: Matrix

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, programs: Programs) -> "CompiledLinear":
        """Holds the tensors as they are."""
        return cls(weight, bias, programs, Matrix.of(weight, bias=bias))

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        if self.programs.serve(x.shape[0]):
            return self.programs(x, self.matrix, None)
        return functional.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """See `Linear`."""
        if self.programs.serve(x.shape[0]):
            return self.programs(x, self.matrix, other)
        return functional.linear(x, self.weight, self.bias).add_(other)


@dataclass(frozen=True, slots=True)
class CompiledGated:
    """A `Gated` of matrices that `suits`. All of it is computed in fp32 and rounded once."""

    gate: Tensor
    up: Tensor
    programs: Programs
    matrix: Matrix

    @classmethod
    def of(cls, gate: Tensor, up: Tensor, programs: Programs) -> "CompiledGated":
        """Holds the tensors as they are."""
        return cls(gate, up, programs, Matrix.of(up, gate=gate))

    def __call__(self, x: Tensor) -> Tensor:
        """See `Gated`."""
        if self.programs.serve(x.shape[0]):
            return self.programs(x, self.matrix, None)
        return functional.silu(functional.linear(x, self.gate), inplace=True).mul_(functional.linear(x, self.up))


def _check(x: Tensor, size: tuple[int, ...]) -> None:
    """What programs are given the address of must be what they take it for."""
    if x.shape != size or x.dtype != torch.bfloat16:
        raise ValueError(f"{x.dtype} numbers in the shape {list(x.shape)} instead of bfloat16 ones in {list(size)}")


def _with_plain_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
