"""Channels are kept while they are of use."""

import asyncio

from kv_transfer.channels import Channels
from tests.kv_transfer.cluster import side, sides

HERE, THERE = "127.0.0.1:1", "127.0.0.1:2"
DEADLINE_S = 30.0


async def until(channels: Channels, count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while len(channels) != count:  # noqa: ASYNC110 - nobody signals it
            await asyncio.sleep(0)


async def test_an_address_has_one_channel_that_is_used_again() -> None:
    channels = Channels()
    with channels.use(HERE) as first, channels.use(HERE) as second, channels.use(THERE) as other:
        assert first is second is not other
    with channels.use(HERE) as again:
        assert again is first
    assert len(channels) == 2
    await channels.close()
    assert len(channels) == 0


async def test_a_channel_that_nobody_uses_any_more_is_closed_and_others_are_not() -> None:
    channels = Channels(idle_s=0.02)
    with channels.use(HERE) as kept:
        with channels.use(THERE):
            pass
        await until(channels, 1)
        with channels.use(HERE) as again:
            assert again is kept
    await until(channels, 0)
    with channels.use(HERE) as reopened:
        assert reopened is not kept
    await until(channels, 0)
    await channels.close()


async def test_pulls_go_on_over_a_channel_that_was_closed_between_them() -> None:
    async with sides(side(2, 4, 4), side(1, 4, 4), 64) as both:
        (puller,) = both.pullers
        puller._channels = channels = Channels(idle_s=0.02)
        await both.move(0, 32)
        await until(channels, 0)
        await both.move(32, 64)
        both.check()
