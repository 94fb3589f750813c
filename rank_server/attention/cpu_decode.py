"""Attention of rows with few queries over a paged bf16 cache on a CPU, all rows of a step in one call of a compiled program.

A query's keys are cut into ranges by their number alone and the ranges dealt out to the threads, so that one long row occupies
all of them; results depend neither on the number of threads nor on the other rows of the step. Other dtypes take torch's way:
what makes it slow for bf16 is the copy in fp32 of everything that is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.attention.decode_program import ARGUMENT, STEP, TILE, DecodeProgram, partial_floats, scratch_floats
from rank_server.compiled.emitter import LANES
from rank_server.compiled.tape import Recorder, recorder
from rank_server.compiled.team import Team
from rank_server.compiled.translation import Compiled

FEW_QUERIES = 4
"""Queries of one row that read its keys one after the other; more of them are better off with keys read once for all."""
LARGEST_HEAD_DIM, LARGEST_SHARE = 256, 32
"""Bounds of the program, which grows with both."""
FEWEST_KEYS, MOST_RANGES = 128, 32
"""A range of fewer keys isn't worth its merge; more ranges in a row aren't worth their memory."""

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Record = np.ndarray[tuple[int, ...], np.dtype[np.void]]


def suits(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the program can attend these queries over these caches."""
    return (
        q.shape[1] % k_cache.shape[2] == 0
        and fits(k_cache.dtype, q.shape[1] // k_cache.shape[2], q.shape[2])
        and k_cache.shape == v_cache.shape
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
    )


def fits(dtype: torch.dtype, share: int, head_dim: int) -> bool:
    """The same of a cache's dtype, the query heads of a KV head, and their width."""
    return dtype == torch.bfloat16 and share <= LARGEST_SHARE and head_dim % LANES == 0 and head_dim <= LARGEST_HEAD_DIM


@cache
def program(share: int, head_dim: int, team: bool, wide: bool) -> Compiled:
    """The compiled program for such heads and queries; takes some tenths of a second when it is first asked for."""
    return DecodeProgram(share, head_dim, team, wide).translate()


def few(row: AttentionRow) -> bool:
    """Whether a row is for this module."""
    return row.q_len <= FEW_QUERIES


@dataclass(frozen=True, slots=True)
class Queries:
    """R queries, each over the first so many keys of a row."""

    tokens: Integers
    """[R] rows of the flat batch."""
    tables: Integers
    """Block tables of all rows, one after the other."""
    ranges: Integers
    """[N, 4] where the block table begins in `tables`; first and last + 1 of the keys; keys of all ranges up to its middle."""
    first_range: Integers
    """[R + 1] the ranges of query r are first_range[r] … first_range[r + 1] − 1; a query without keys has none."""
    num_keys: int
    """Of all ranges."""

    @classmethod
    def of(cls, rows: Sequence[AttentionRow], visible: Tensor) -> "Queries":
        """All queries of the rows; visible: of the batch. Ranges begin at multiples of TILE."""
        counts = [row.q_len for row in rows]
        sizes = np.array([len(row.block_table) for row in rows], dtype=np.int64)
        tables = np.concatenate([row.block_table.numpy() for row in rows])
        tokens = np.concatenate([np.arange(row.q_start, row.q_start + row.q_len) for row in rows])
        lens, begins = visible.numpy()[tokens], np.repeat(np.cumsum(sizes) - sizes, counts)
        parts = np.minimum(-(-lens // FEWEST_KEYS), MOST_RANGES)
        first_range = np.concatenate(([0], np.cumsum(parts)))
        query = np.repeat(np.arange(len(tokens)), parts)
        part = np.arange(len(query)) - first_range[query]
        tiles, of_parts = -(-lens // TILE)[query], parts[query]
        firsts = part * tiles // of_parts * TILE
        lasts = np.minimum((part + 1) * tiles // of_parts * TILE, lens[query])
        widths = lasts - firsts
        ranges = np.stack((begins[query], firsts, lasts, np.cumsum(widths) - widths // 2), 1)
        return cls(tokens, tables, np.ascontiguousarray(ranges), first_range, int(widths.sum()))


class CpuDecode:
    """One rank's calls of the program; what the layers of a step share is kept from one to the next.

    use_threads: see `Team.of`.
    """

    def __init__(self, use_threads: bool | None = None) -> None:
        self._team = Team.of(use_threads)
        self._prepared: _Prepared | None = None

    def warm_up(self, share: int, head_dim: int) -> None:
        """Compiles the program for queries in bf16."""
        program(share, head_dim, self._team.together, False)

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Sequence[AttentionRow],
        batch: AttentionBatch,
        scale: float,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Writes the attention of the rows' queries into out [T, h, D] and lse [T, h], fp32, both of the whole batch.

        Arguments as of `partial.paged_partial`, and such that `suits`; rows: those of the batch that are `few`. All sums are
        fp32, nothing is rounded to bf16.
        """
        threads = self._team.threads
        kv_heads, head_dim = k_cache.shape[2:]
        prepared = self._prepared
        if prepared is None or not prepared.serves(batch, q.shape[1], kv_heads, head_dim, threads):
            prepared = self._prepared = _Prepared.of(rows, batch, q.shape[1], kv_heads, head_dim, threads)
        wide = q.dtype != torch.bfloat16
        compiled = program(q.shape[1] // kv_heads, head_dim, self._team.together, wide)
        if wide or q.stride()[1:] != (head_dim, 1):
            q = q.to(torch.float32 if wide else q.dtype).contiguous()
        notes = recorder()
        # A recorded call keeps its argument; the others write theirs in one place.
        argument = prepared.argument if notes is None else prepared.argument.copy()
        argument["q"], argument["q_stride"] = q.data_ptr(), q.stride(0) * q.itemsize
        argument["out"], argument["lse"] = out.data_ptr(), lse.data_ptr()
        argument["k_cache"], argument["v_cache"] = k_cache.data_ptr(), v_cache.data_ptr()
        argument["block_size"], argument["scale"] = k_cache.shape[1], scale
        if notes is not None:
            prepared.let_follow(notes)
        self._team.call(compiled, prepared.address if notes is None else argument.ctypes.data, threads, argument)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Everything a step's calls have in common."""

    batch: AttentionBatch
    heads: int
    kv_heads: int
    head_dim: int
    threads: int
    queries: Queries
    memory: tuple[Floats, Floats]
    step: Record
    """Holds addresses of the others."""
    argument: Record
    """Holds the address of `step`."""
    address: int
    """Of the argument."""

    def serves(self, batch: AttentionBatch, heads: int, kv_heads: int, head_dim: int, threads: int) -> bool:
        sizes = self.heads, self.kv_heads, self.head_dim, self.threads
        return self.batch is batch and sizes == (heads, kv_heads, head_dim, threads)

    def let_follow(self, notes: Recorder) -> None:
        """Has the calls of a recorded step, which are given the address of this one's `step`, attend what the batch of a later
        step says."""
        kept: list[_Prepared] = []

        def follow(batch: AttentionBatch) -> None:
            kept[:] = [_Prepared.of(batch.rows, batch, self.heads, self.kv_heads, self.head_dim, self.threads)]
            self.step[...] = kept[0].step

        notes.followers.setdefault(self.address, follow)

    @classmethod
    def of(
        cls, rows: Sequence[AttentionRow], batch: AttentionBatch, heads: int, kv_heads: int, head_dim: int, threads: int
    ) -> "_Prepared":
        queries = Queries.of(rows, batch.visible)
        floats = scratch_floats(kv_heads, heads // kv_heads, head_dim)
        scratch = np.empty(threads * floats, dtype=np.float32)
        partial = np.empty(len(queries.ranges) * heads * partial_floats(head_dim), dtype=np.float32)
        step, argument = np.zeros((), dtype=STEP), np.zeros((), dtype=ARGUMENT)
        for name, array in (("scratch", scratch), ("partial", partial)):
            step[name] = array.ctypes.data
        for name in ("tokens", "tables", "ranges", "first_range"):
            step[name] = getattr(queries, name).ctypes.data
        step["scratch_floats"], step["kv_heads"] = floats, kv_heads
        step["num_rows"], step["num_keys"] = len(queries.tokens), queries.num_keys
        argument["step"] = step.ctypes.data
        memory = (scratch, partial)
        return cls(batch, heads, kv_heads, head_dim, threads, queries, memory, step, argument, argument.ctypes.data)
