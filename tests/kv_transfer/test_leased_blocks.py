"""What is read only while its lease holds: blocks that expire, are handed out again, or are not offered to the reader."""

import asyncio

import grpc
import pytest

from cp_wire.errors import InvalidRequest, Stale
from cp_wire.pb import kv_transfer_pb2 as pb
from kv_transfer.leases import Ended, sweep
from kv_transfer.pull import Limits, TransferFailed
from tests.kv_transfer.cluster import DEADLINE_S, EPOCH, SESSION, side, sides
from tests.kv_transfer.failing import PAIR, Gated, failure, soon

SMALL = Limits(message_bytes=64)


async def test_h1_a_lease_that_expired_before_the_pull_is_an_error() -> None:
    async with sides(*PAIR, 33, ttl_s=10) as both:
        both.clock.now += 10
        failed = await failure(both)
        assert failed.reason == "LEASE_ENDED" and "expired" in str(failed)
        both.check_untouched()
        assert [leases.take_ended()[0].how for leases in both.leases] == ["expired", "expired"]


async def test_h1_a_lease_that_expires_in_the_middle_ends_the_pull() -> None:
    async with sides(*PAIR, 33, ttl_s=10, servicer=Gated, limits=SMALL) as both:
        pulling = asyncio.create_task(both.move())
        for servicer in both.servicers:
            assert isinstance(servicer, Gated)
            await soon(servicer.reached)
        both.clock.now += 10
        for servicer in both.servicers:
            servicer.gate.set()
        with pytest.raises(TransferFailed) as failed:
            await pulling
        assert failed.value.reason == "LEASE_ENDED"


async def test_h1_blocks_that_were_handed_out_again_are_never_sent() -> None:
    """The owner breaks its promise between the look before the read and the look after it."""
    async with sides(*PAIR, 33) as both:
        rank, store = both.sources[0], both.servicers[0]._source.store

        class Stolen:
            geometry, shared = store.geometry, None

            def read(self, *args: object) -> None:
                rank.generations.stamp(rank.blocks[:1])
                rank.pool[:] = 666
                store.read(*args)  # type: ignore[arg-type]

        both.servicers[0]._source.store = Stolen()  # type: ignore[assignment]
        failed = await failure(both)
        assert failed.reason == "STALE" and "handed out again" in str(failed)
        assert not any((target.pool == 666).any() for target in both.targets)


@pytest.mark.parametrize("how", ["stolen", "expired"])
async def test_h1_what_was_copied_counts_only_if_the_blocks_are_still_the_sessions(how: str) -> None:
    async with sides(side(1, 4, 4), side(1, 4, 4), 33, host="here", ttl_s=10) as both:
        (rank,), (source,), (target,) = both.sources, both.servicers, both.targets
        write = target.store.write

        def late(*args: object) -> None:
            if how == "stolen":
                rank.generations.stamp(rank.blocks[:1])
            else:
                both.clock.now += 10
            write(*args)  # type: ignore[arg-type]

        target.store.write = late  # type: ignore[method-assign]
        failed = await failure(both)
        assert failed.reason == ("STALE" if how == "stolen" else "LEASE_ENDED")
        assert (failed.report.messages, failed.report.shared_bytes) == (0, 0)
        assert source._source.leases.active == (how == "stolen")


async def test_h3_a_renewed_lease_outlives_its_first_term() -> None:
    renewed = asyncio.Event()

    class Slow(Gated):
        async def Renew(self, request: pb.RenewRequest, context: grpc.aio.ServicerContext) -> pb.RenewResponse:
            answer = await super().Renew(request, context)
            renewed.set()
            return answer

    async with sides(side(1, 4, 4), side(1, 4, 4), 33, ttl_s=0.3, servicer=Slow) as both:
        (slow,) = both.servicers
        assert isinstance(slow, Slow)
        pulling = asyncio.create_task(both.move())
        await soon(slow.reached)
        both.clock.now += 0.2
        await soon(renewed)
        both.clock.now += 0.2
        slow.gate.set()
        await pulling
        both.check()


async def test_h9_expiry_is_reported_without_anybody_asking() -> None:
    async with sides(*PAIR, 9, ttl_s=10) as both:
        told: asyncio.Queue[list[Ended]] = asyncio.Queue()
        sweeping = asyncio.create_task(sweep(both.leases[0], told.put_nowait, 0.001))
        both.clock.now += 10
        async with asyncio.timeout(DEADLINE_S):
            (ended,) = await told.get()
        sweeping.cancel()
        assert (ended.how, list(ended.blocks)) == ("expired", both.sources[0].blocks)


@pytest.mark.parametrize("host", ["", "here"], ids=["fetched", "copied"])
async def test_h2_tokens_that_are_not_offered_are_not_taken(host: str) -> None:
    async with sides(side(1, 4, 4), side(1, 4, 4), 40, tokens=16, host=host) as both:
        failed = await failure(both, 0, 40)
        assert failed.reason == "INVALID_REQUEST" and "at most the 16 tokens" in str(failed)
        both.check_untouched()
        await both.move(0, 16)
        both.check(0, 16)


async def test_h2_a_rank_that_has_released_takes_nothing_more() -> None:
    async with sides(side(1, 4, 4), side(1, 4, 4), 33, host="here") as both:
        both.leases[0].get(SESSION).readers.add(9)
        await both.release()
        failed = await failure(both)
        assert failed.reason == "STALE" and "has released" in str(failed)
        assert failed.report.shared_bytes == 0


@pytest.mark.parametrize(("fields", "refusal"), [({"target_rank": 1}, Stale), ({"end": 17}, InvalidRequest)], ids=str)
async def test_h2_a_renewal_is_for_readers_of_what_is_offered(fields: dict[str, int], refusal: type[Exception]) -> None:
    async with sides(side(1, 4, 4), side(1, 4, 4), 40, tokens=16) as both:
        source, instance = both.servicers[0]._source, both.sources[0].place.instance
        request = {"session": SESSION, "epoch": EPOCH, "instance": instance, "target_rank": 0, "end": 16}
        assert source.renew(pb.RenewRequest(**request)).tokens == 16
        with pytest.raises(refusal):
            source.renew(pb.RenewRequest(**request | fields))
