import pytest
import torch

from rank_server.kv_pool import KvPool


def pool(dtype: torch.dtype = torch.float32) -> KvPool:
    return KvPool(num_layers=2, num_blocks=3, block_size=4, num_kv_heads=2, head_dim=5, dtype=dtype, device="cpu")


def test_a_token_lies_at_its_slot_in_its_layer_and_nowhere_else() -> None:
    p = pool()
    k, v = torch.randn(3, 2, 5), torch.randn(3, 2, 5)
    p.write(1, k, v, torch.tensor([11, 0, 5]))
    k_cache, v_cache = p.cache(1)
    assert k_cache.shape == v_cache.shape == (3, 4, 2, 5)
    for token, (block, offset) in enumerate([(2, 3), (0, 0), (1, 1)]):
        assert torch.equal(k_cache[block, offset], k[token])
        assert torch.equal(v_cache[block, offset], v[token])
    assert int(k_cache.count_nonzero()) == int(v_cache.count_nonzero()) == 3 * 2 * 5
    assert not p.cache(0)[0].any() and not p.cache(0)[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_what_the_slots_hold(dtype: torch.dtype) -> None:
    p = pool(dtype)
    k, v = torch.randn(4, 2, 5), torch.randn(4, 2, 5)
    p.write(1, k, v, torch.tensor([11, 0, 5, 6]))
    got_k, got_v = p.read(1, torch.tensor([5, 11, 5])).chunk(2, dim=1)
    assert torch.equal(got_k, k[[2, 0, 2]].to(dtype))
    assert torch.equal(got_v, v[[2, 0, 2]].to(dtype))


def test_tokens_of_other_shards_are_skipped() -> None:
    p = pool()
    k = torch.arange(1.0, 4.0)[:, None, None].expand(3, 2, 5)
    p.write(0, k, -k, torch.tensor([-1, 6, -1]))
    k_cache, v_cache = p.cache(0)
    assert k_cache[1, 2].unique().tolist() == [2.0]
    assert v_cache[1, 2].unique().tolist() == [-2.0]
    assert int(k_cache.count_nonzero()) == 10
    p.fill_nan(range(3))
    p.write(0, k, k, torch.tensor([-1, -1, -1]))
    assert k_cache.isnan().all() and v_cache.isnan().all()


def test_a4_the_last_slot_can_be_used_and_the_one_behind_it_is_refused() -> None:
    p = pool()
    k = torch.ones(1, 2, 5)
    p.write(1, k, k, torch.tensor([11]))
    assert p.cache(1)[1][2, 3].sum() == 10
    with pytest.raises(IndexError):
        p.write(1, k, k, torch.tensor([12]))


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes_per_block_are_k_and_v_of_all_layers(dtype: torch.dtype, size: int) -> None:
    assert pool(dtype).bytes_per_block == 2 * 2 * 4 * 2 * 5 * size
    assert pool(dtype).dtype == dtype


def test_values_are_cast_to_the_dtype_of_the_cache() -> None:
    p = pool(torch.bfloat16)
    k = torch.full((1, 2, 5), 1.001)
    p.write(0, k, k, torch.tensor([0]))
    assert p.cache(0)[0][0, 0, 0, 0] == torch.tensor(1.001).bfloat16()


def test_b6_debug_fill_reaches_every_layer_of_the_named_blocks_only() -> None:
    p = pool()
    p.fill_nan([0, 2])
    for layer in range(2):
        for cache in p.cache(layer):
            assert cache[[0, 2]].isnan().all()
            assert not cache[1].isnan().any()


def test_sizes_below_one_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="2 layers, 0 blocks of 4 tokens, 2 heads of 5"):
        KvPool(2, 0, 4, 2, 5, torch.float32, "cpu")


def test_a_pool_of_latents_keeps_one_row_per_token() -> None:
    p = KvPool(2, 3, 4, num_kv_heads=1, head_dim=5, dtype=torch.float32, device="cpu", rows=1)
    assert p.bytes_per_block == 2 * 4 * 5 * 4
    p.fill_nan(range(3))
    latents = torch.randn(3, 5)
    p.write_latents(1, latents, torch.tensor([11, -1, 5]))
    cache = p.latents(1)
    assert cache.shape == (3, 4, 5)
    assert torch.equal(cache[2, 3], latents[0])
    assert torch.equal(cache[1, 1], latents[2])
    assert int((~cache.isnan()).sum()) == 2 * 5
    assert p.latents(0).isnan().all()
