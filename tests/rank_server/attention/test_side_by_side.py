"""Heads as one tensor."""

import torch

from rank_server.attention.side_by_side import side_by_side

HEADS = torch.arange(3 * 6 * 4, dtype=torch.float32).view(3, 6, 4)


def test_neighbours_are_a_view() -> None:
    joined = side_by_side(HEADS[:, 1:3], HEADS[:, 3:4], HEADS[:, 4:])
    assert torch.equal(joined, HEADS[:, 1:])
    assert joined.data_ptr() == HEADS[:, 1:].data_ptr()


def test_anything_else_is_a_copy() -> None:
    for parts in (
        (HEADS[:, 3:5], HEADS[:, 1:3]),
        (HEADS[:, :2], HEADS[:, 3:]),
        (HEADS[:, :2], HEADS[:, 2:].clone()),
        (HEADS[:, :2, :3], HEADS[:, 2:4, 1:]),
        (HEADS[:, :2], HEADS[:, 2:].contiguous().transpose(0, 1).contiguous().transpose(0, 1)),
    ):
        joined = side_by_side(*parts)
        assert torch.equal(joined, torch.cat(parts, dim=1))
        assert joined.untyped_storage().data_ptr() != HEADS.untyped_storage().data_ptr()


def test_one_part_and_no_tokens() -> None:
    assert side_by_side(HEADS[:, 2:5]).shape == (3, 3, 4)
    assert side_by_side(HEADS[:0, :2], HEADS[:0, 2:]).shape == (0, 6, 4)
