"""Attention of rows with many queries over bf16 keys on a CPU, in the paged cache or at hand, by a compiled program.

A row's queries are cut into blocks, which threads take as they become free. No query's result depends on the others it is
computed with, hence neither on the cut, nor on the number of threads, nor on the other rows of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.attention.prefill_program import ARGUMENT, PrefillProgram, scratch_bytes
from rank_server.attention.prefill_tile import GROUP, GROUPS
from rank_server.compiled import avx512
from rank_server.compiled.emitter import LANES
from rank_server.compiled.tape import recorder
from rank_server.compiled.team import Team
from rank_server.compiled.translation import Compiled

LARGEST_DIM = 1024
"""Bound of the memory of a thread."""
BLOCKS_PER_THREAD = 4
"""With fewer blocks threads would wait too long for the last one: blocks become smaller instead."""

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def suits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the program can attend q [T, h, D] over k, v: caches [num_blocks, B, hk, D] or keys at hand [n, hk, D]."""
    paged = k.dim() == 4
    return (
        q.dtype == k.dtype
        and q.shape[1] % k.shape[-2] == 0
        and fits(k.dtype, q.shape[2], v.shape[-1])
        and not (paged and any(x.stride(-1) != 1 or x.stride(0) != x.shape[1] * x.stride(1) for x in (k, v)))
    )


def fits(dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """The same of the cache's dtype and the widths of heads, on this processor."""
    widths = all(dim % LANES == 0 and dim <= LARGEST_DIM for dim in (key_dim, value_dim))
    return dtype == torch.bfloat16 and widths and avx512.available()


@cache
def program(share: int, key_dim: int, value_dim: int, team: bool) -> Compiled:
    """The compiled program for such heads; takes some tenths of a second when it is first asked for."""
    return PrefillProgram(share, key_dim, value_dim, team).translate()


@dataclass(frozen=True, slots=True)
class Items:
    """The work of a call, cut up. Queries of a row and a KV head are numbered by token, then by query head."""

    tables: Integers
    """Block tables of all rows, one after the other."""
    items: Integers
    """[N, 5] where the row's block table begins in `tables`, the row's first token, KV head, first query, number of queries."""

    @classmethod
    def of(cls, rows: Sequence[AttentionRow], kv_heads: int, share: int, threads: int) -> "Items":
        """All queries of R ≥ 1 rows; of a row those come first that usually see most."""
        sizes = np.array([len(row.block_table) for row in rows], dtype=np.int64)
        starts = np.array([row.q_start for row in rows], dtype=np.int64)
        queries = np.array([row.q_len * share for row in rows], dtype=np.int64)
        groups = int((-(-queries // GROUP)).sum()) * kv_heads
        size = GROUP * max(1, min(GROUPS, groups // (BLOCKS_PER_THREAD * threads)))
        blocks = -(-queries // size)
        counts = blocks * kv_heads
        row = np.repeat(np.arange(len(rows)), counts)
        number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        first = (blocks[row] - 1 - number % blocks[row]) * size
        count = np.minimum(queries[row] - first, size)
        items = np.stack(((np.cumsum(sizes) - sizes)[row], starts[row], number // blocks[row], first, count), 1)
        return cls(np.concatenate([row.block_table.numpy() for row in rows]), np.ascontiguousarray(items))


@lru_cache(maxsize=64)
def _one_row(tokens: int, kv_heads: int, share: int, threads: int) -> Items:
    """Queries over a single block of keys."""
    return Items.of([AttentionRow(0, tokens, torch.from_numpy(np.zeros(1, dtype=np.int64)), 0, 0)], kv_heads, share, threads)


class CpuPrefill:
    """One rank's calls of the program; what the layers of a step share is kept from one to the next.

    use_threads: see `Team.of`.
    """

    def __init__(self, use_threads: bool | None = None) -> None:
        self._team = Team.of(use_threads)
        self._prepared: _Prepared | None = None
        self._scratch: Tensor | None = None

    def warm_up(self, share: int, key_dim: int, value_dim: int) -> None:
        """Compiles the program."""
        program(share, key_dim, value_dim, self._team.together)

    def attend_paged(
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
        """Writes the attention of the rows' queries into out [T, h, E] and lse [T, h], fp32, both of the whole batch.

        Arguments as of `partial.paged_partial`, and such that `suits`, scale > 0; rows: some of those of the batch, the same
        ones for each layer. Softmax weights are rounded to bf16, scores and sums are fp32.
        """
        kv_heads, heads, threads = k_cache.shape[2], q.shape[1], self._team.threads
        prepared = self._prepared
        if prepared is None or not prepared.serves(batch, heads, kv_heads, threads):
            items = Items.of(rows, kv_heads, heads // kv_heads, threads)
            prepared = self._prepared = _Prepared(batch, heads, kv_heads, threads, items)
        self._attend(q, k_cache, v_cache, k_cache.shape[1], prepared.items, batch.visible, scale, out, lse)

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out [t, h, E], lse [t, h], fp32): as `partial.dense_partial`, such that `suits`, t ≥ 1, n ≥ 1, scale > 0."""
        tokens, heads, _ = q.shape
        num_keys, kv_heads, value_dim = v.shape
        visible = torch.full((tokens,), num_keys, device=q.device) if seen is None else seen.to(torch.int64).contiguous()
        items = _one_row(tokens, kv_heads, heads // kv_heads, self._team.threads)
        out = q.new_empty((tokens, heads, value_dim), dtype=torch.float32)
        lse = q.new_empty((tokens, heads), dtype=torch.float32)
        self._attend(q, k, v, num_keys, items, visible, scale, out, lse)
        return out, lse

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_size: int,
        items: Items,
        visible: Tensor,
        scale: float,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """k, v: block b of a table has the block_size tokens from b · block_size on."""
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        threads, kv_heads = self._team.threads, k.shape[-2]
        size = scratch_bytes(q.shape[2], v.shape[-1])
        if self._scratch is None or len(self._scratch) < threads * size:
            self._scratch = torch.empty(threads * size, dtype=torch.uint8, device=q.device)
        argument = np.zeros((), dtype=ARGUMENT)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            argument[name] = tensor.data_ptr()
            argument[f"{name}_token"], argument[f"{name}_head"] = (tensor.stride(dim) * tensor.itemsize for dim in (-3, -2))
        for name, tensor in (("out", out), ("lse", lse), ("visible", visible), ("scratch", self._scratch)):
            argument[name] = tensor.data_ptr()
        argument["tables"], argument["items"] = items.tables.ctypes.data, items.items.ctypes.data
        argument["num_items"], argument["kv_heads"] = len(items.items), kv_heads
        argument["block_size"], argument["scale"] = block_size, scale
        compiled = program(q.shape[1] // kv_heads, q.shape[2], v.shape[-1], self._team.together)
        if (notes := recorder()) is not None:
            notes.refuse("attention of rows with many queries")
        self._team.call(compiled, argument.ctypes.data, threads, argument)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a step's calls have in common."""

    batch: AttentionBatch
    heads: int
    kv_heads: int
    threads: int
    items: Items

    def serves(self, batch: AttentionBatch, heads: int, kv_heads: int, threads: int) -> bool:
        return self.batch is batch and (self.heads, self.kv_heads, self.threads) == (heads, kv_heads, threads)
