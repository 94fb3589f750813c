"""Pools filled to their last block: nothing beside what a step owns is written, nothing that is free is read."""

import random

import pytest
import torch

from coordinator.plan import Sampling
from rank_server.kv_pool import KvPool
from tests.inproc import Shape, cluster
from tests.tiny_models import greedy_reference

B, CP, BLOCKS = 4, 4, 4
FENCE = 999
"""NaNs before and behind a pool's memory."""


def prompt_of(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(200) for _ in range(length)]


def fence(executor):
    """Gives a rank a pool of the same content whose memory lies between two strips of NaN; returns everything."""
    old = executor.pool
    whole = torch.full((2 * FENCE + old._data.numel(),), torch.nan)
    inside = whole[FENCE:-FENCE]
    inside.copy_(old._data.flatten())
    sizes = (old.num_layers, old.num_blocks, old.block_size, old.num_kv_heads, old.head_dim)
    executor._pool = KvPool(*sizes, old.dtype, old.device, memory=inside.view(torch.uint8))
    executor._model = executor._ways = None
    return whole


def bits(pool, blocks):
    """Content of the blocks in all layers, comparable where it is NaN."""
    return pool._data[:, :, sorted(blocks)].clone().view(torch.int32)


@pytest.mark.parametrize("interleave", [1, B])
def test_a4_a_full_pool_leaves_its_neighbours_alone(tiny, interleave):
    """One request's cached block on every member; a second request takes all the others, to the last token."""
    path = tiny(heads=8, kv_heads=2)
    with cluster(path, Shape(pcp=CP, dcp=CP, interleave=interleave, block_size=B, blocks=BLOCKS)) as running:
        wholes = running.everywhere(fence)
        pools = [executor.pool for executor in running.executors]
        running.generate([prompt_of(B * CP + 1, 1)], 1)
        free = [running.free_blocks(member) for member in range(CP)]
        assert [len(blocks) for blocks in free] == [BLOCKS - 1] * CP
        kept = [set(range(BLOCKS)) - blocks for blocks in free]
        before = [bits(pool, blocks) for pool, blocks in zip(pools, kept, strict=True)]
        prompt, more = prompt_of(3 * B * CP - 6, 2), 7
        request = running.submit(prompt, Sampling(temperature=0.0, max_tokens=more))
        least = set(free[0])
        while running.generations[request.handle].finish_reason is None:
            for item in running.step():
                running.generations[request.handle].finish_reason = item.finished
            least &= running.free_blocks(0)
        assert least == set()
        assert running.generations[request.handle].token_ids == greedy_reference(path, prompt, more)
        for pool, blocks, content in zip(pools, kept, before, strict=True):
            assert torch.equal(bits(pool, blocks), content)
            assert not content.view(torch.float32).isnan().any()
        for whole in wholes:
            assert whole[:FENCE].isnan().all() and whole[-FENCE:].isnan().all()


@pytest.mark.parametrize("interleave", [1, B])
def test_b6_what_is_given_back_holds_nan_until_it_is_written_again(tiny, interleave):
    path = tiny(heads=8, kv_heads=2)
    with cluster(path, Shape(pcp=2, dcp=2, interleave=interleave, block_size=B, blocks=8)) as running:
        running.generate([prompt_of(length, length) for length in (13, 9, 17)], 9)
        assert max(generation.num_preemptions for generation in running.generations.values()) > 0
        free_blocks = [running.free_blocks(member) for member in range(2)]
        assert any(free_blocks)
        for free, executor in zip(free_blocks, running.executors, strict=True):
            cached = set(range(8)) - free
            assert cached
            assert executor.pool._data[:, :, sorted(free)].isnan().all()
            assert not executor.pool._data[:, :, sorted(cached)].isnan().any()
