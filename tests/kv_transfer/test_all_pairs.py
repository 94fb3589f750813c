"""KV between all pairs of layouts, over real servers: every token of every head arrives once, and everything is given back."""

import itertools
import random
from dataclasses import replace

import pytest

from cp_layout.reshard import Side
from tests.kv_transfer.cluster import HEAD_BYTES, PLANES, TEST_LIMITS, Sides, sides
from tests.layout_pairs import grids, layouts, lengths, on_grids

LIMITS = replace(TEST_LIMITS, message_bytes=1000, idle_s=20, call_s=20)
"""Several messages for most links, and waits that a busy machine does not exhaust."""
KV_HEADS = (1, 2, 3, 4, None)
"""None: a latent head."""


def all_pairs() -> list[tuple[Side, Side]]:
    """The whole product of layouts, layouts and heads."""
    every = list(itertools.product(layouts(), layouts()))
    return [pair for kv_heads in KV_HEADS for pair in on_grids(every, kv_heads, seed=kv_heads)]


def some_pairs() -> list[tuple[Side, Side]]:
    """Six of every number of heads."""
    chooser, every = random.Random(12), all_pairs()
    return [pair for heads in KV_HEADS for pair in chooser.sample([each for each in every if each[0].kv_heads == heads], 6)]


def named(end: Side) -> str:
    grid, layout = end.grid, end.layout
    heads = f"kv{end.kv_heads}" if end.kv_heads else "latent"
    return f"{heads}-{grid.tp}.{grid.pcp}.{grid.dcp}-I{layout.interleave}-B{layout.block_size}-{end.shard_offset}"


async def move_and_give_back(both: Sides) -> None:
    stamps = [rank.generations.now() for rank in (*both.sources, *both.targets)]
    reports = await both.move()
    both.check()
    both.check_written_once()
    bytes_per_token = PLANES * both.target.heads * HEAD_BYTES
    assert sum(report.payload_bytes for report in reports) == both.length * bytes_per_token * both.target.copies
    assert not any(report.duplicates + report.corrupted + report.stale + report.retries for report in reports)
    await both.release()
    for leases, rank in zip(both.leases, both.sources, strict=True):
        (ended,) = leases.take_ended()
        assert (ended.session, ended.how, list(ended.blocks)) == (both.session, "released", rank.blocks)
        assert leases.active == 0
    assert not any(puller._target.budget.held for puller in both.pullers)
    assert [rank.generations.now() for rank in (*both.sources, *both.targets)] == stamps


async def check(source: Side, target: Side) -> None:
    """1 token, and around the end of the source's first virtual block and of the target's second."""
    shorter = lengths(source.layout.virtual_block_size, 2 * target.layout.virtual_block_size)
    async with sides(source, target, shorter.pop(), limits=LIMITS) as both:
        await move_and_give_back(both)
        for length in shorter:
            both.again(length)
            await move_and_give_back(both)


@pytest.mark.parametrize(("source", "target"), some_pairs(), ids=named)
async def test_h13_h14_tokens_between_pairs_of_layouts(source: Side, target: Side) -> None:
    await check(source, target)


@pytest.mark.sweep
@pytest.mark.parametrize(("source", "target"), all_pairs(), ids=named)
async def test_h13_h14_tokens_between_all_pairs_of_layouts(source: Side, target: Side) -> None:
    await check(source, target)


def test_every_grid_of_every_layout_is_an_end_of_some_pair() -> None:
    wanted = {(n, heads, grid) for n in (1, 2, 4) for heads in KV_HEADS for grid in grids(n, heads)}
    for ends in zip(*all_pairs(), strict=True):
        assert {(end.layout.num_shards, end.kv_heads, end.grid) for end in ends} == wanted
