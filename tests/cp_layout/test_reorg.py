"""How cached context is gathered: golden vectors, and laws over a grid of layouts."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from cp_layout.errors import LayoutError
from cp_layout.interleave import Layout
from cp_layout.reorg import Piece, context_pieces, gathered_rows, padded_local_len, real_rows

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "layout_vectors.json").read_text())["mla_context_chunks"]["cases"]
LAYOUTS = [Layout(n, i, b) for n in (1, 2, 3, 4) for b in (1, 4) for i in (1, 2, 4) if b % i == 0 and i <= b]


def brought(layout: Layout, lengths: list[int], piece: Piece, shard_offset: int = 0) -> list[int]:
    """Token ids (context·1000 + position, −1 for padding) of the gather of a piece, member after member."""
    rows = []
    for member in range(layout.num_shards):
        shard = layout.shard_on(member, shard_offset)
        for segment in piece.segments:
            owned = [p for p in range(lengths[segment.context]) if layout.owner(p) == shard]
            mine = [segment.context * 1000 + p for p in owned][segment.first : segment.first + segment.rows]
            rows += mine + [-1] * (segment.rows - len(mine))
    return rows


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['context_lens']}-N{case['N']}-I{case['I']}")
def test_golden_chunks(case: dict) -> None:  # type: ignore[type-arg]
    layout, lengths = Layout(case["N"], case["I"], case["B"]), case["context_lens"]
    pieces = context_pieces(lengths, layout, case["workspace_rows"])
    assert len(pieces) == len(case["chunks"])
    for piece, chunk in zip(pieces, case["chunks"], strict=True):
        assert [segment.first for segment in piece.segments] == chunk["local_starts"]
        assert [segment.rows for segment in piece.segments] == chunk["padded_local_lens"]
        assert piece.rows == chunk["local_rows"]
        assert [segment.context for segment in piece.segments] == list(range(*chunk["requests"]))
        tokens = np.array(brought(layout, lengths, piece))
        order = [gathered_rows(layout, lengths[s.context], s, piece.rows, 0) for s in piece.segments]
        assert tokens[np.concatenate(order)].tolist() == chunk["reorg_order"]
        assert [0, *np.cumsum([len(rows) for rows in order]).tolist()] == chunk["cu_seq_lens"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_c1_every_token_comes_once_and_no_padding_is_taken_for_one(layout: Layout) -> None:
    """Contexts of 1, 2 and 3 workspaces ± 1 token, alone and beside another."""
    least = layout.num_shards * layout.interleave
    for workspace in (least, 2 * least, 3 * least + 1):
        around = sorted({max(w * workspace + d, 0) for w in (1, 2, 3) for d in (-1, 0, 1)})
        for lengths in [[length] for length in around] + [[a, b] for a, b in itertools.product(around[:4], (0, 1, 7))]:
            for offset in range(layout.num_shards):
                seen: dict[int, list[int]] = {context: [] for context in range(len(lengths))}
                for piece in context_pieces(lengths, layout, workspace):
                    assert piece.rows * layout.num_shards <= workspace
                    tokens = np.array(brought(layout, lengths, piece, offset))
                    for segment in piece.segments:
                        keys = gathered_rows(layout, lengths[segment.context], segment, piece.rows, offset)
                        seen[segment.context] += tokens[keys].tolist()
                for context, length in enumerate(lengths):
                    assert sorted(seen[context]) == [context * 1000 + p for p in range(length)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_segments_begin_where_a_run_begins(layout: Layout) -> None:
    for piece in context_pieces([101, 3], layout, 3 * layout.num_shards * layout.interleave):
        for segment in piece.segments:
            assert segment.first % layout.interleave == 0
            assert segment.rows % layout.interleave == 0


def test_whole_contexts_share_a_piece_and_long_ones_are_split() -> None:
    layout = Layout(2, 2, 4)
    packed = context_pieces([8, 5, 4], layout, 24)
    assert [[s.context for s in piece.segments] for piece in packed] == [[0, 1, 2]]
    assert [s.at for s in packed[0].segments] == [0, 4, 8]
    split = context_pieces([8, 30, 4], layout, 16)
    assert [[(s.context, s.first, s.rows) for s in piece.segments] for piece in split] == [
        [(0, 0, 4)],
        [(1, 0, 8)],
        [(1, 8, 8)],
        [(2, 0, 2)],
    ]


def test_c6_pieces_are_bounded_by_the_workspace_alone() -> None:
    layout = Layout(4, 16, 16)
    for lengths in ([1 << 20], [4096] * 256):
        pieces = context_pieces(lengths, layout, 8192)
        assert max(piece.rows for piece in pieces) * 4 <= 8192
        assert sum(piece.rows for piece in pieces) * 4 == sum(padded_local_len(layout, length) * 4 for length in lengths)


def test_real_rows_are_what_a_shard_owns_of_a_segment() -> None:
    layout = Layout(2, 2, 4)
    (piece,) = context_pieces([7], layout, 100)
    assert [real_rows(layout, 7, piece.segments[0], shard) for shard in (0, 1)] == [4, 3]


def test_nothing_is_gathered_for_nothing() -> None:
    assert context_pieces([0, 0], Layout(2, 1, 4), 8) == ()
    assert context_pieces([], Layout(2, 1, 4), 8) == ()


def test_a_workspace_below_one_run_of_every_shard_is_refused() -> None:
    with pytest.raises(LayoutError, match="workspace of 7 rows holds less than one run of 4 tokens of each of 2 shards"):
        context_pieces([9], Layout(2, 4, 4), 7)
