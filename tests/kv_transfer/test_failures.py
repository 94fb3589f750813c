"""Ends that die, freeze or restart, and pulls that are given up."""

import asyncio

import grpc
import pytest

from cp_wire.channels import open_channel
from cp_wire.pb import kv_transfer_pb2 as pb
from kv_transfer.facts import side_message
from kv_transfer.framing import FETCH
from kv_transfer.pull import Limits, Peer, TransferFailed
from kv_transfer.service import KvTransferServicer
from kv_transfer.source import Source
from tests.kv_transfer.cluster import SESSION, side, sides
from tests.kv_transfer.failing import PAIR, Gated, failure, soon

QUICK = Limits(message_bytes=64, idle_s=0.2, call_s=0.2, deadline_s=5, attempts=2)


async def test_h4_a_cancelled_pull_writes_nothing_more_and_leaves_nothing_open() -> None:
    async with sides(*PAIR, 33, servicer=Gated) as both:
        pulling = asyncio.create_task(both.move())
        for servicer in both.servicers:
            assert isinstance(servicer, Gated)
            await soon(servicer.reached)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        before = [target.pool.copy() for target in both.targets]
        for servicer in both.servicers:
            servicer.gate.set()
            await soon(servicer.ended)
        assert all((target.pool == pool).all() for target, pool in zip(both.targets, before, strict=True))
        assert all(puller._target.budget.held == 0 for puller in both.pullers)
        await both.release()
        assert [leases.take_ended()[0].how for leases in both.leases] == ["released", "released"]


async def test_h10_a_source_that_never_answers_fails_the_pull_in_time() -> None:
    class BlackHole(KvTransferServicer):
        async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
            await asyncio.Event().wait()
            raise AssertionError

    async with sides(*PAIR, 9, limits=QUICK, servicer=BlackHole) as both:
        failed = await failure(both)
        assert (failed.reason, failed.report.retries) == ("DEADLINE_EXCEEDED", 2)
        both.check_untouched()


async def test_h10_a_source_that_freezes_in_the_middle_fails_the_pull_in_time() -> None:
    async with sides(*PAIR, 33, limits=QUICK, servicer=Gated) as both:
        failed = await failure(both)
        assert failed.reason == "DEADLINE_EXCEEDED" and "no message for 0.2 s" in str(failed)
        assert failed.report.messages > 0


async def test_h22_the_deadline_counts_from_the_first_message() -> None:
    limits = Limits(message_bytes=64, idle_s=5, deadline_s=0.3)
    async with sides(*PAIR, 33, limits=limits, servicer=Gated) as both:
        failed = await failure(both)
        assert failed.reason == "DEADLINE_EXCEEDED" and "not done after 0.3 s" in str(failed)


async def test_a_reader_that_takes_nothing_does_not_hold_a_stream_for_good() -> None:
    """More than the transport buffers, and nobody reads it."""
    stalled = asyncio.Event()

    class Watched(KvTransferServicer):
        async def send(self, frame: bytes, context: grpc.aio.ServicerContext) -> None:
            try:
                await super().send(frame, context)
            except asyncio.CancelledError:
                stalled.set()
                raise

    def watched(source: Source) -> KvTransferServicer:
        return Watched(source, write_s=0.2)

    heads = 64
    ends = side(1, 4, 4, kv_heads=heads), side(1, 4, 4, kv_heads=heads)
    async with sides(*ends, 8192, servicer=watched) as both:
        request = pb.FetchRequest(
            session=SESSION, attempt=1, epoch=3, instance=both.sources[0].place.instance, generation=1, start=0, end=8192,
            message_bytes=1 << 20, messages=range(16), target=side_message(both.target),
        )  # fmt: skip
        async with open_channel(both.peers[0].address, "data") as channel:
            call = channel.unary_stream(FETCH, request_serializer=pb.FetchRequest.SerializeToString)(request, timeout=60)
            await soon(stalled)
            with pytest.raises(grpc.aio.AioRpcError) as stopped:
                while await call.read():
                    pass
            assert stopped.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "no message was taken for 0.2 s" in (stopped.value.details() or "")


async def test_a_dead_source_fails_the_pull() -> None:
    async with sides(*PAIR, 33, limits=QUICK) as both:
        await both.servers[1].stop(0)
        failed = await failure(both)
        assert failed.reason in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
        assert "source rank 1 at 127.0.0.1:" in str(failed)


async def test_h15_a_source_that_restarted_at_its_address_is_not_read() -> None:
    async with sides(*PAIR, 33) as both:
        both.peers = {rank: Peer(peer.address, "former-life") for rank, peer in both.peers.items()}
        failed = await failure(both)
        assert failed.reason == "CONFIG_REFUSED" and "former-life" in str(failed)
        both.check_untouched()
        await both.release()
        assert [leases.active for leases in both.leases] == [1, 1]


async def test_m_blocks_of_the_target_that_were_handed_out_are_not_written() -> None:
    async with sides(*PAIR, 33, servicer=Gated) as both:
        pulling = asyncio.create_task(both.move())
        for servicer in both.servicers:
            assert isinstance(servicer, Gated)
            await soon(servicer.reached)
        (target,) = both.targets
        target.generations.stamp(target.blocks)
        target.pool[:] = 5
        for servicer in both.servicers:
            servicer.gate.set()
        with pytest.raises(TransferFailed) as failed:
            await pulling
        assert failed.value.reason == "TARGET_REUSED"
        assert (target.pool == 5).all()
