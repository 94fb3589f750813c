"""Latent attention of a step's queries over the latents of this shard, read from the paged cache."""

import torch
from torch import Tensor

from rank_server.attention.batch import AttentionBatch, AttentionRow
from rank_server.attention.latent import UpProjection
from rank_server.attention.running_softmax import RunningSoftmax

KEY_TILE = 512
"""Keys that are attended together, as fp32: bounds what is alive beside the cache."""
SCORE_TILE = 1 << 20
"""Scores alive at a time."""


def latent_partial(q: Tensor, cache: Tensor, width: int, batch: AttentionBatch, scale: float) -> tuple[Tensor, Tensor]:
    """Partial attention (out [T, h, dc], lse [T, h], natural log, fp32) of absorbed queries q [T, h, dc + dr] over this shard.

    cache: [num_blocks, B, dc + dr]; width: dc. A query sees the first `batch.visible` latents of its row; one that sees none
    gets exactly (0, −inf).
    """
    tokens, heads, _ = q.shape
    out = q.new_zeros((tokens, heads, width), dtype=torch.float32)
    lse = q.new_full((tokens, heads), -torch.inf, dtype=torch.float32)
    step = max(1, SCORE_TILE // (KEY_TILE * heads))
    for row in batch.rows:
        for first in range(row.q_start, row.q_start + row.q_len, step):
            tile = slice(first, min(first + step, row.q_start + row.q_len))
            visible = batch.visible[tile]
            if int(visible[-1]) == 0:
                continue
            queries = q[tile].to(torch.float32).mul(scale).flatten(0, 1)
            running = RunningSoftmax(1, len(queries), width, q.device)
            seen = visible.repeat_interleave(heads)
            for start, latents in _pieces(cache, row, int(visible[-1])):
                scores = _hidden((queries @ latents.T).unsqueeze(0), seen, start)
                running.add(slice(None), scores, latents[None, :, :width])
            part, part_lse = running.result()
            out[tile], lse[tile] = part.view(-1, heads, width), part_lse.view(-1, heads)
    return out, lse


def expanded_partial(
    q: Tensor, cache: Tensor, row: AttentionRow, visible: Tensor, up: UpProjection, scale: float
) -> tuple[Tensor, Tensor]:
    """The same for the queries q [t, h, dn + dr] of one row, with keys and values expanded: (out [t, h, dv], lse [t, h]).

    visible: [t], ascending. A piece of the latents is expanded once for all queries.
    """
    queries = q.to(torch.float32).mul(scale).transpose(0, 1)
    running = RunningSoftmax(q.shape[1], len(q), up.shape.v_head_dim, q.device)
    for start, latents in _pieces(cache, row, int(visible[-1])):
        add_expanded(running, queries, latents, visible, start, up)
    out, lse = running.result()
    return out.transpose(0, 1), lse.transpose(0, 1)


def add_expanded(
    running: RunningSoftmax, queries: Tensor, latents: Tensor, visible: Tensor | None, start: int, up: UpProjection
) -> None:
    """Adds attention of queries [h, t, dn + dr], scaled, fp32, over latents [n, dc + dr] that begin at key `start`.

    visible: [t] ascending, query i sees the keys before visible[i]; None: every query sees all of them.
    """
    keys, values = (x.to(torch.float32) for x in up.expand(latents))
    heads, tokens, _ = queries.shape
    step = max(1, SCORE_TILE // (len(latents) * heads))
    # Queries before `begin` see none of these keys.
    begin = 0 if visible is None else int(torch.searchsorted(visible, start, right=True))
    for first in range(begin, tokens, step):
        rows = slice(first, min(first + step, tokens))
        scores = torch.bmm(queries[:, rows], keys.transpose(1, 2))
        running.add(rows, scores if visible is None else _hidden(scores, visible[rows], start), values)


def _hidden(scores: Tensor, visible: Tensor, start: int) -> Tensor:
    """scores [*, r, n] of keys start … start + n − 1, those that a row may not see made −inf in place."""
    stop = start + scores.shape[-1]
    if int(visible.min()) < stop:
        keys = torch.arange(start, stop, device=scores.device)
        scores.masked_fill_(keys >= visible.unsqueeze(-1), -torch.inf)
    return scores


def _pieces(cache: Tensor, row: AttentionRow, count: int):  # type: ignore[no-untyped-def]
    """(index of the first, latents [n, dc + dr] fp32) of the first `count` latents of a row, in order."""
    for start in range(0, count, KEY_TILE):
        stop = min(start + KEY_TILE, count)
        yield start, read_latents(cache, row.block_table, start, stop).to(torch.float32)


def read_latents(cache: Tensor, block_table: Tensor, first: int, last: int) -> Tensor:
    """Latents first … last − 1 of a request on this shard, [n, dc + dr], out of cache [num_blocks, B, dc + dr]; a copy."""
    b = cache.shape[1]
    column = first // b
    blocks = cache.index_select(0, block_table[column : -(-last // b)]).flatten(0, 1)
    return blocks[first - column * b : last - column * b]
