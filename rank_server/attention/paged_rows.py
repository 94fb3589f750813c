"""Decode rows of a step as a device's kernel wants them: one padded table instead of one object per row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rank_server.attention.batch import AttentionRow


@dataclass(frozen=True, slots=True)
class PagedRows:
    """R queries, each over the paged keys of its own row."""

    tokens: Tensor
    """[R] int64 rows of the flat batch."""
    tables: Tensor
    """[R, C] int64 block tables, padded with 0; C ≥ 1."""
    lens: Tensor
    """[R] int64 keys that each query sees."""
    longest: int

    @classmethod
    def of(cls, rows: Sequence[AttentionRow], device: torch.device) -> "PagedRows":
        """Of rows with one query each; three copies to the device, whatever their number."""
        longest = max((row.local_len for row in rows), default=0)
        columns = max((len(row.block_table) for row in rows), default=0)
        tables = torch.zeros((len(rows), max(columns, 1)), dtype=torch.int64, device="cpu")
        for table, row in zip(tables, rows, strict=True):
            table[: len(row.block_table)] = row.block_table
        tokens, lens = [row.q_start for row in rows], [row.local_len for row in rows]
        return cls(
            tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
            tables=tables.to(device),
            lens=torch.tensor(lens, dtype=torch.int64, device=device),
            longest=longest,
        )
