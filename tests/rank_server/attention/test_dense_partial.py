import math

import pytest
import torch

from rank_server.attention.merge import OnlineMerge
from rank_server.attention.partial import dense_partial
from rank_server.attention.portable import dense_portable
from tests.rank_server.attention.dense import dense_attention
from tests.rank_server.attention.test_partial import LargestTensor

SCALE = 0.3


def tensors(tokens: int, num_keys: int, heads: int = 4, kv_heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(tokens, heads, 8, generator=generator)
    k, v = (torch.randn(num_keys, kv_heads, 8, generator=generator) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize(
    ("tokens", "num_keys", "seen"),
    [
        (1, 1, [1]),
        (3, 7, [1, 4, 7]),
        (3, 7, [7, 0, 2]),
        (4, 5, None),
        (3, 4, [0, 0, 0]),
        (2, 0, None),
        (2, 0, [0, 0]),
        (600, 700, [(i * 37) % 701 for i in range(600)]),
        (5, 5000, [4999, 0, 2048, 2049, 1]),
    ],
)
def test_b3_b7_every_query_sees_its_own_number_of_keys(tokens: int, num_keys: int, seen: list[int] | None) -> None:
    q, k, v = tensors(tokens, num_keys)
    visible = torch.full((tokens,), num_keys) if seen is None else torch.tensor(seen)
    out, lse = dense_partial(q, k, v, SCALE, None if seen is None else visible)
    wanted_out, wanted_lse = dense_attention(q, k, v, visible, SCALE)
    torch.testing.assert_close(out.double(), wanted_out, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=2e-6)
    assert (out[visible == 0] == 0).all()
    assert (lse[visible == 0] == -math.inf).all()


def test_b6_keys_that_nobody_sees_may_hold_anything() -> None:
    q, k, v = tensors(3, 9)
    seen = torch.tensor([2, 0, 6])
    wanted = dense_partial(q, k, v, SCALE, seen)
    k[6:], v[6:] = math.nan, math.inf
    got = dense_partial(q, k, v, SCALE, seen)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


def test_strided_keys() -> None:
    q, k, v = tensors(3, 9)
    wide = torch.cat([k, v], dim=-1)
    got, wanted = dense_partial(q, wide[..., :8], wide[..., 8:], SCALE), dense_partial(q, k, v, SCALE)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("attend", [dense_partial, dense_portable])
@pytest.mark.parametrize("width", [3, 5, 16])
def test_values_may_be_of_another_width(attend, width: int) -> None:
    q, k, _ = tensors(4, 9)
    v = torch.randn(9, 2, width, generator=torch.Generator().manual_seed(6))
    seen = torch.tensor([2, 0, 9, 6])
    out, lse = attend(q, k, v, SCALE, seen)
    wanted_out, wanted_lse = dense_attention(q, k, v, seen, SCALE)
    torch.testing.assert_close(out.double(), wanted_out, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=2e-6)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="4 query heads can't share 3 KV heads"):
        dense_partial(*tensors(1, 1, kv_heads=3), SCALE)


def test_pieces_of_the_keys_add_up() -> None:
    q, k, v = tensors(4, 30)
    seen = torch.tensor([0, 3, 17, 30])
    merged = OnlineMerge(q.shape)
    assert (merged.result()[0] == 0).all() and (merged.result()[1] == -math.inf).all()
    for first in range(0, 30, 7):
        piece = slice(first, min(first + 7, 30))
        merged.add(*dense_partial(q, k[piece], v[piece], SCALE, (seen - first).clamp(0, piece.stop - first)))
    out, lse = merged.result()
    wanted_out, wanted_lse = dense_attention(q, k, v, seen, SCALE)
    torch.testing.assert_close(out.double(), wanted_out, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=2e-6)
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all()


def test_o2_masks_over_many_keys_stay_within_the_workspace() -> None:
    q, k, v = tensors(256, 5000)
    seen = torch.arange(256) * 19
    with LargestTensor() as largest:
        out, _ = dense_partial(q, k, v, SCALE, seen, workspace_bytes=1 << 18)
    assert largest.nbytes <= 1 << 18
    torch.testing.assert_close(out.double(), dense_attention(q, k, v, seen, SCALE)[0], rtol=0, atol=5e-6)
