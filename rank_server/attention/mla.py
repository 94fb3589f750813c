"""Attention over latents, absorbed or with expanded keys: see `latent`.

Keys are taken a tile at a time and in fp32, so that what is alive beside them does not grow with the context.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rank_server.attention.batch import AttentionBatch
from rank_server.attention.latent import UpProjection
from rank_server.attention.running_softmax import RunningSoftmax

KEY_TILE = 512
"""Keys that are attended together."""
SCORE_TILE = 1 << 20
"""Scores alive at a time."""

Read = Callable[[int, int], Tensor]
"""(first, last) → latents first … last − 1 of a row, [n, dc + dr]."""


def latent_partial(q: Tensor, cache: Tensor, width: int, batch: AttentionBatch, scale: float) -> tuple[Tensor, Tensor]:
    """Partial attention (out [T, h, dc], lse [T, h], natural log, fp32) of absorbed queries q [T, h, dc + dr] over this shard.

    cache: [num_blocks, B, dc + dr]; width: dc. A query sees the first `batch.visible` latents of its row; one that sees none
    gets exactly (0, −inf).
    """
    out = q.new_zeros((*q.shape[:2], width), dtype=torch.float32)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for row in batch.rows:
        rows = slice(row.q_start, row.q_start + row.q_len)
        if row.local_len > 0:
            read = paged_reader(cache, row.block_table)
            out[rows], lse[rows] = absorbed(q[rows], read, row.local_len, batch.visible[rows], width, scale)
    return out, lse


def absorbed(q: Tensor, read: Read, count: int, visible: Tensor | None, width: int, scale: float) -> tuple[Tensor, Tensor]:
    """(out [t, h, dc], lse [t, h]) of absorbed queries q [t, h, dc + dr] of one row over its `count` latents.

    visible: [t] ascending, query i sees the latents before visible[i]; None: every query sees all.
    """
    tokens, heads, _ = q.shape
    out = q.new_empty((tokens, heads, width), dtype=torch.float32)
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    step = max(1, SCORE_TILE // (KEY_TILE * heads))
    for first in range(0, tokens, step):
        tile = slice(first, min(first + step, tokens))
        queries = q[tile].to(torch.float32).mul(scale).flatten(0, 1)
        seen = None if visible is None else visible[tile].repeat_interleave(heads)
        running = RunningSoftmax(1, len(queries), width, q.device)
        for start, latents in _tiles(read, count if visible is None else int(visible[tile][-1])):
            latents = latents.to(torch.float32)
            scores = _hidden((queries @ latents.T).unsqueeze(0), seen, start)
            running.add(slice(None), scores, latents[None, :, :width])
        part, part_lse = running.result()
        out[tile], lse[tile] = part.view(-1, heads, width), part_lse.view(-1, heads)
    return out, lse


def expanded(
    q: Tensor, read: Read, count: int, visible: Tensor | None, up: UpProjection, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [t, h, dv], lse [t, h]) of queries q [t, h, dn + dr] as they are; the rest as in `absorbed`.

    A tile of the latents is expanded once for all queries.
    """
    tokens, heads, _ = q.shape
    queries = q.to(torch.float32).mul(scale).transpose(0, 1)
    running = RunningSoftmax(heads, tokens, up.shape.v_head_dim, q.device)
    last = count if visible is None else int(visible[-1]) if tokens else 0
    for start, latents in _tiles(read, last):
        keys, values = (x.to(torch.float32) for x in up.expand(latents))
        step = max(1, SCORE_TILE // (len(latents) * heads))
        # Queries before `begin` see none of these keys.
        begin = 0 if visible is None else int(torch.searchsorted(visible, start, right=True))
        for first in range(begin, tokens, step):
            rows = slice(first, min(first + step, tokens))
            scores = torch.bmm(queries[:, rows], keys.transpose(1, 2))
            running.add(rows, _hidden(scores, None if visible is None else visible[rows], start), values)
    out, lse = running.result()
    return out.transpose(0, 1), lse.transpose(0, 1)


def paged_reader(cache: Tensor, block_table: Tensor) -> Read:
    """Reads a request's latents on this shard out of cache [num_blocks, B, dc + dr]; what it gives is a copy."""
    b = cache.shape[1]
    table = block_table.to(cache.device)  # kept in host memory

    def read(first: int, last: int) -> Tensor:
        column = first // b
        blocks = cache.index_select(0, table[column : -(-last // b)]).flatten(0, 1)
        return blocks[first - column * b : last - column * b]

    return read


def _tiles(read: Read, count: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, count, KEY_TILE):
        yield start, read(start, min(start + KEY_TILE, count))


def _hidden(scores: Tensor, visible: Tensor | None, start: int) -> Tensor:
    """scores [*, r, n] of keys start … start + n − 1, those that a row may not see made −inf in place."""
    stop = start + scores.shape[-1]
    if visible is not None and int(visible.min()) < stop:
        keys = torch.arange(start, stop, device=scores.device)
        scores.masked_fill_(keys >= visible.unsqueeze(-1), -torch.inf)
    return scores
