import pytest
import torch

from rank_server.attention import one_query
from rank_server.attention.keys import DenseKeys
from rank_server.attention.one_query import attend_one
from tests.rank_server.attention.dense import dense_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_keys", [1, 5, 6, 7, 40, 41, 97])
@pytest.mark.parametrize("scores", [1, 40 * 6, 1 << 20])
def test_tiles_and_blocks_of_scores_give_what_all_keys_at_once_give(
    scores: int, num_keys: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_query, "SCORES", scores)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(6, 8, generator=generator).to(dtype)
    k, v = (torch.randn(100, 2, 8, generator=generator).to(dtype) for _ in range(2))
    k[num_keys:], v[num_keys:] = torch.nan, torch.nan
    out, lse = attend_one(q, DenseKeys(k, v), 2, num_keys, 0.3, tile_bytes=6 * 2 * 8 * 4)
    wanted, wanted_lse = dense_attention(q[None], k[:num_keys], v[:num_keys], torch.tensor([num_keys]), 0.3)
    torch.testing.assert_close(out.double(), wanted[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), wanted_lse[0], rtol=1e-6, atol=2e-6)
