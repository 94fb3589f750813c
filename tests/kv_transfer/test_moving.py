"""Real servers, every token of every head and layer: it arrives once, and nothing else is written."""

import asyncio
import itertools

import grpc
import pytest

from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.reshard import Side
from cp_wire.pb import kv_transfer_pb2 as pb
from kv_transfer import framing
from kv_transfer.pull import Limits
from kv_transfer.service import KvTransferServicer
from tests.kv_transfer.cluster import HEAD_BYTES, PLANES, SESSION, Sides, side, sides

PAIRS = [
    (side(4, 1, 16), side(1, 16, 16)),
    (side(1, 4, 4), side(2, 2, 16)),
    (side(2, 4, 4, offset=1), side(4, 1, 4, offset=3)),
    (side(2, 16, 16), side(2, 16, 16, offset=1)),
    (side(2, 2, 4, tp=2, kv_heads=4), side(1, 4, 4, tp=4, kv_heads=4)),
    (Side(Grid(tp=4, dcp=2), Layout(2, 1, 4), 2), side(1, 16, 16, kv_heads=2)),
    (side(1, 4, 4, tp=3, kv_heads=3), side(2, 4, 4, kv_heads=3)),
    (Side(Grid(tp=4), Layout(1, 4, 4), 1), side(4, 4, 4)),
    (Side(Grid(tp=2, dcp=2), Layout(2, 1, 4), None), Side(Grid(tp=4, dcp=4), Layout(4, 4, 4), None)),
    (Side(Grid(tp=2, pcp=2), Layout(1, 4, 4), 2), side(2, 1, 4, tp=1, kv_heads=2)),
]
LENGTHS = [1, 31, 32, 33]


def payload(both: Sides, start: int, end: int) -> int:
    return (end - start) * PLANES * both.target.heads * HEAD_BYTES * both.target.copies


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} → {pair[1]}")
async def test_h12_h13_tokens_arrive_once_and_sources_are_freed_once(pair: tuple[Side, Side], length: int) -> None:
    async with sides(*pair, length) as both:
        reports = await both.move()
        both.check()
        assert sum(report.payload_bytes for report in reports) == payload(both, 0, length)
        assert not any(report.duplicates + report.corrupted + report.stale + report.retries for report in reports)
        await both.release()
        await both.release()
        for leases, rank in zip(both.leases, both.sources, strict=True):
            (ended,) = leases.take_ended()
            assert (ended.session, ended.how, list(ended.blocks)) == (SESSION, "released", rank.blocks)
            assert leases.take_ended() == [] and leases.active == 0


async def test_ranges_follow_one_another_while_the_prefill_goes_on() -> None:
    async with sides(side(2, 1, 4), side(1, 16, 16), 50, tokens=20) as both:
        await both.move(0, 20)
        both.check(0, 20)
        for leases in both.leases:
            leases.extend(SESSION, [], 50)
        (report,) = await both.move(20, 50)
        both.check(0, 50)
        assert report.payload_bytes == payload(both, 20, 50)


async def test_f12_tokens_that_the_target_has_are_not_sent() -> None:
    async with sides(side(1, 4, 4), side(2, 4, 4), 30) as both:
        reports = await both.move(8, 30)
        both.check(8, 30)
        assert sum(report.payload_bytes for report in reports) == payload(both, 8, 30)


async def test_an_empty_range_asks_nobody() -> None:
    async with sides(side(2, 4, 4), side(1, 4, 4), 9) as both:
        for server in both.servers:
            await server.stop(0)
        (report,) = await both.move(9, 9)
        assert report.messages == 0


async def test_messages_are_as_many_as_their_bytes_need_whatever_the_runs() -> None:
    for interleave in (1, 16):
        async with sides(side(4, interleave, 16), side(1, 16, 16), 128) as both:
            (report,) = await both.move()
            # 32 tokens of 4 planes of 8 bytes from each source, 256 bytes a message.
            assert report.messages == 4 * 4


async def test_messages_carry_a_mebibyte_unless_told_otherwise() -> None:
    """2.5 MiB of one source, to a puller without limits of its own, as a rank has it."""
    carried: list[int] = []

    class Noted(KvTransferServicer):
        async def send(self, frame: bytes, context: grpc.aio.ServicerContext) -> None:
            carried.append(len(framing.decode(frame).payload))
            await super().send(frame, context)

    tokens = 5 * (1 << 19) // (PLANES * HEAD_BYTES)
    async with sides(side(1, 16, 16), side(1, 16, 16), tokens, limits=None, servicer=Noted) as both:
        (report,) = await both.move()
        both.check()
    assert carried == [1 << 20, 1 << 20, 1 << 19]
    assert (report.messages, report.payload_bytes) == (3, sum(carried))


@pytest.mark.parametrize(("bytes_in_flight", "streams"), [(1, 1), (2 * 128, 2), (1 << 20, 4)])
async def test_no_more_bytes_are_in_flight_than_allowed_and_few_are_enough(bytes_in_flight: int, streams: int) -> None:
    """Two messages of each source that sends."""
    sending, most, full = 0, 0, asyncio.Event()

    class Counted(KvTransferServicer):
        async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
            nonlocal sending, most
            sending += 1
            most = max(most, sending)
            if sending == streams:
                full.set()
            await full.wait()
            await super().Fetch(request, context)
            sending -= 1

    limits = Limits(message_bytes=64, bytes_in_flight=bytes_in_flight)
    async with sides(side(4, 1, 4), side(1, 4, 4), 33, limits=limits, servicer=Counted) as both:
        await both.move()
        both.check()
    assert most == streams


async def test_ends_on_one_host_copy_from_pool_to_pool() -> None:
    for pair, length in itertools.product(PAIRS, (1, 33)):
        async with sides(*pair, length, host="here") as both:
            reports = await both.move()
            both.check()
            assert sum(report.shared_bytes for report in reports) == payload(both, 0, length)
            assert not any(report.corrupted + report.retries for report in reports)
            await both.release()
            assert all(leases.active == 0 for leases in both.leases)


async def test_a_source_of_the_same_host_names_the_blocks_of_the_range_alone() -> None:
    asked: list[tuple[pb.DescribeRequest, pb.DescribeResponse]] = []

    class Noted(KvTransferServicer):
        async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
            answer = await super().Describe(request, context)
            asked.append((request, answer))
            return answer

    async with sides(side(1, 4, 4), side(2, 2, 4), 100, host="here", servicer=Noted) as both:
        for start, end in ((0, 50), (50, 70), (70, 100)):
            await both.move(start, end)
        both.check()
        blocks = both.sources[0].blocks
        named = [(request.first_column, list(answer.blocks)) for request, answer in asked]
        for (first, got), (start, end) in zip(named, [(0, 50)] * 2 + [(50, 70)] * 2 + [(70, 100)] * 2, strict=True):
            assert start // 4 <= first and got == blocks[first : first + len(got)] and first + len(got) <= -(-end // 4)


async def test_a_pool_that_cannot_be_opened_leaves_the_stream() -> None:
    async with sides(side(1, 4, 4), side(1, 4, 4), 9, host="here") as both:
        shared = both.sources[0].shared
        assert shared is not None
        shared._key = b"another"
        (report,) = await both.move()
        both.check()
        assert (report.shared_bytes, report.payload_bytes) == (0, payload(both, 0, 9))


async def test_ends_on_different_hosts_share_nothing() -> None:
    async with sides(side(1, 4, 4), side(1, 4, 4), 9, host="here") as both:
        both.targets[0].facts.host = "there"
        (report,) = await both.move()
        both.check()
        assert report.shared_bytes == 0
