"""How many tokens the scheduler really places: N members hold N times what one holds, up to the rounding of blocks (G7)."""

import random
from collections.abc import Iterable

import pytest

from coordinator.plan import Sampling
from coordinator.request import Request
from coordinator.scheduler import Scheduler, SchedulerConfig
from cp_layout.interleave import Layout

BLOCKS = 256
ENOUGH = 4096


def placed(layout: Layout, lengths: Iterable[int]) -> int:
    """Prompt tokens of the requests that get in together before the first one that has to wait."""
    scheduler = Scheduler(SchedulerConfig(ENOUGH, 10**9, ENOUGH), layout, BLOCKS, b"")
    for handle, length in enumerate(lengths):
        scheduler.add(Request(handle, "r", [handle] * length, Sampling(max_tokens=1)))
    step = scheduler.schedule()
    assert step is not None
    assert scheduler.waiting > 0, "the pool never filled up"
    return step.num_tokens


def uniform(block_size: int, num_shards: int, seed: int) -> list[int]:
    """Lengths uniform in 1..12·B, twice as many tokens as N pools hold."""
    rng = random.Random(seed)
    return [rng.randint(1, 12 * block_size) for _ in range(2 * BLOCKS * num_shards // 6)]


@pytest.mark.parametrize("num_shards", [2, 3, 4, 8])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_g7_short_requests_of_random_lengths_use_at_least_93_percent(num_shards, block_size):
    sharded = [placed(Layout(num_shards, block_size, block_size), uniform(block_size, num_shards, seed)) for seed in range(4)]
    single = [placed(Layout(1, block_size, block_size), uniform(block_size, num_shards, seed)) for seed in range(4)]
    assert sum(sharded) >= 0.93 * num_shards * sum(single)


@pytest.mark.parametrize("num_shards", [2, 4, 8])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("whole_blocks", [True, False])
def test_g7_long_requests_use_at_least_98_percent(num_shards, block_size, whole_blocks):
    """Of N times the slots of one member: requests of 63½ virtual blocks, then of one, until one has to wait."""
    layout = Layout(num_shards, block_size if whole_blocks else 1, block_size)
    v = layout.virtual_block_size
    assert placed(layout, [64 * v - v // 2] * 4 + [v] * 4) >= 0.98 * num_shards * BLOCKS * block_size
