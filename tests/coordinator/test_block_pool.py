import random

import pytest

from coordinator.block_pool import BlockPool, PoolError


def take(pool: BlockPool, count: int) -> list[int]:
    return [pool.take()[0] for _ in range(count)]


def test_blocks_come_in_ascending_runs_also_when_they_come_back():
    pool = BlockPool(5)
    first = take(pool, 3)
    assert first == [0, 1, 2]
    for block in reversed(first):
        pool.release(block)
    assert take(pool, 5) == [0, 1, 2, 3, 4]


def test_an_empty_pool_is_refused_and_an_exhausted_one_says_so():
    with pytest.raises(ValueError, match="at least one block, got 0"):
        BlockPool(0)
    pool = BlockPool(2)
    take(pool, 2)
    with pytest.raises(PoolError, match="none of the 2 blocks"):
        pool.take()


def test_a_cached_block_is_evictable_when_released_and_evicted_last():
    pool = BlockPool(3)
    a, b = take(pool, 2)
    pool.mark_cached(a)
    pool.release(a)
    pool.release(b)
    assert (pool.num_free, pool.is_held(a)) == (3, False)
    assert pool.take() == (b, False)
    assert pool.take() == (2, False)
    assert pool.take() == (a, True)
    with pytest.raises(PoolError, match="shared but not cached"):
        pool.share(a)


def test_the_longest_unused_block_is_evicted_first_and_use_refreshes():
    pool = BlockPool(3)
    blocks = take(pool, 3)
    for block in blocks:
        pool.mark_cached(block)
        pool.release(block)
    pool.share(0)
    pool.release(0)
    assert take(pool, 3) == [1, 2, 0]


def test_a_shared_block_is_not_evictable_until_its_last_holder_leaves():
    pool = BlockPool(1)
    (block,) = take(pool, 1)
    pool.mark_cached(block)
    pool.share(block)
    pool.release(block)
    assert pool.num_free == 0
    with pytest.raises(PoolError):
        pool.take()
    pool.release(block)
    assert pool.num_free == 1
    pool.share(block)
    assert (pool.num_free, pool.is_held(block)) == (0, True)


def test_a_forgotten_block_is_free_if_nobody_holds_it():
    pool = BlockPool(2)
    a, b = take(pool, 2)
    for block in (a, b):
        pool.mark_cached(block)
    pool.release(a)
    pool.unmark_cached(a)
    pool.unmark_cached(b)
    assert (pool.num_free, pool.is_held(b)) == (1, True)
    pool.release(b)
    assert pool.num_free == 2
    assert [evicted for _, evicted in (pool.take(), pool.take())] == [False, False]


def test_misuse_is_named():
    pool = BlockPool(2)
    with pytest.raises(PoolError, match="block 0 is released but nobody holds it"):
        pool.release(0)
    with pytest.raises(PoolError, match="not held"):
        pool.mark_cached(0)
    with pytest.raises(PoolError, match="shared but not cached"):
        pool.share(0)
    with pytest.raises(PoolError, match="not in it"):
        pool.unmark_cached(0)
    (block,) = take(pool, 1)
    pool.mark_cached(block)
    with pytest.raises(PoolError, match="while cached"):
        pool.mark_cached(block)
    pool.release(block)
    with pytest.raises(PoolError):
        pool.release(block)


@pytest.mark.parametrize("seed", range(5))
def test_i6_random_use_keeps_every_block_in_exactly_one_place(seed):
    rng = random.Random(seed)
    pool = BlockPool(8)
    holders: list[int] = []
    cached: set[int] = set()
    for _ in range(1000):
        action = rng.choice(["take", "release", "cache", "share", "forget"])
        held = set(holders)
        if action == "take" and pool.num_free:
            block, evicted = pool.take()
            assert block not in held
            assert evicted == (block in cached)
            cached.discard(block)
            holders.append(block)
        elif action == "release" and holders:
            pool.release(holders.pop(rng.randrange(len(holders))))
        elif action == "cache" and held - cached:
            block = rng.choice(sorted(held - cached))
            pool.mark_cached(block)
            cached.add(block)
        elif action == "share" and cached:
            block = rng.choice(sorted(cached))
            pool.share(block)
            holders.append(block)
        elif action == "forget" and cached:
            block = rng.choice(sorted(cached))
            pool.unmark_cached(block)
            cached.discard(block)
        held = set(holders)
        assert pool.num_free == pool.num_blocks - len(held)
        assert {block for block in range(8) if pool.is_held(block)} == held
