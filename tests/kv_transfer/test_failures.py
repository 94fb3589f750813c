"""Ends that die, freeze, restart, expire or do not fit together, and pulls that are given up."""

import asyncio
from collections.abc import Callable

import grpc
import pytest

from cp_layout.interleave import Layout
from cp_layout.reshard import Side
from cp_wire.channels import open_channel
from cp_wire.errors import InvalidRequest, Stale
from cp_wire.pb import kv_transfer_pb2 as pb
from kv_transfer.facts import side_message
from kv_transfer.framing import FETCH
from kv_transfer.leases import Ended, sweep
from kv_transfer.pull import Limits, Peer, TransferFailed
from kv_transfer.service import KvTransferServicer
from kv_transfer.source import Source
from tests.kv_transfer.cluster import DEADLINE_S, EPOCH, SESSION, Sides, side, sides

PAIR = (side(2, 1, 4), side(1, 4, 4))
SMALL = Limits(message_bytes=64)
QUICK = Limits(message_bytes=64, idle_s=0.2, call_s=0.2, deadline_s=5, attempts=2)


class Gated(KvTransferServicer):
    """Sends `free` messages, sets `reached`, and goes on when `gate` is set."""

    def __init__(self, source: Source, free: int = 1) -> None:
        super().__init__(source, write_s=1.0)
        self.free = free
        self.reached = asyncio.Event()
        self.gate = asyncio.Event()
        self.ended = asyncio.Event()

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            await super().Fetch(request, context)
        finally:
            self.ended.set()

    async def send(self, frame: bytes, context: grpc.aio.ServicerContext) -> None:
        if self.free == 0:
            self.reached.set()
            await self.gate.wait()
        else:
            self.free -= 1
        await super().send(frame, context)


async def failure(both: Sides, *range_: int) -> TransferFailed:
    with pytest.raises(TransferFailed) as failed:
        await both.move(*range_)
    return failed.value


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await event.wait()


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol_version", "0"),
        ("model_hash", "another"),
        ("dtype", "float16"),
        ("planes", 6),
        ("kv_heads", 2),
        ("head_bytes", 16),
        ("axis_order", "token,plane,head,dim"),
        ("byte_order", "middle"),
    ],
)
async def test_h14_the_handshake_names_the_field_that_differs(field: str, value: object) -> None:
    async with sides(*PAIR, 9) as both:
        setattr(both.sources[0].facts, field, value)
        failed = await failure(both)
        assert failed.reason == "CONFIG_REFUSED"
        assert f"{field} is {value!r} here" in str(failed)
        both.check_untouched()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda both: setattr(both, "source", side(2, 2, 4)), "the transfer was planned with 2"),
        (lambda both: setattr(both, "source", side(2, 1, 8)), "the transfer was planned with 8"),
        (lambda both: setattr(both, "source", side(4, 1, 4)), "source rank 2 has no address"),
        (
            lambda both: setattr(both, "source", side(2, 1, 4, offset=1)),
            "the transfer was planned with 1",
        ),
        (lambda both: setattr(both, "source", side(2, 1, 4, kv_heads=2)), "they are not the same model"),
        (lambda both: setattr(both, "target", side(1, 8, 8)), "is not this rank's side"),
        (lambda both: both.targets[0].blocks.pop(), "the block table has 8 columns, the runs need 9"),
        (
            lambda both: setattr(both, "peers", dict(zip((0, 1), reversed(both.peers.values()), strict=True))),
            "the transfer was planned with",
        ),
    ],
)
async def test_h14_a_plan_that_does_not_fit_is_refused(change: Callable[[Sides], None], said: str) -> None:
    async with sides(*PAIR, 33) as both:
        change(both)
        failed = await failure(both)
        assert said in str(failed)
        both.check_untouched()


@pytest.mark.parametrize(
    ("change", "reason", "said"),
    [
        ({"session": 5}, "NOT_FOUND", "transfer 5 is not known"),
        ({"epoch": 2}, "STALE", "is of epoch 3, the call of 2"),
        ({"instance": ""}, "STALE", "the call is for none"),
        ({"generation": 9}, "STALE", "generation 1, not 9"),
        ({"target_rank": 4}, "STALE", "or was never to read it"),
        ({"start": 9}, "INVALID_REQUEST", "end is 9"),
        ({"end": 34}, "INVALID_REQUEST", "of the 33 that can be read"),
        ({"message_bytes": 0}, "INVALID_REQUEST", "between 1 and 2097152"),
        ({"message_bytes": 3 << 20}, "INVALID_REQUEST", "between 1 and 2097152"),
        ({"messages": [99]}, "INVALID_REQUEST", "there are 1"),
        ({"target": pb.KvSide(tp=1, pcp=1, dcp=1, interleave=3, block_size=0)}, "CONFIG_REFUSED", "block size"),
        ({"target": pb.KvSide(tp=4096, pcp=4096)}, "CONFIG_REFUSED", "16777216 ranks is more than the limit of 4096"),
        ({"target": pb.KvSide(tp=1, pcp=2, dcp=2, interleave=1, block_size=4)}, "CONFIG_REFUSED", "nothing for rank 0"),
    ],
)
async def test_a_source_refuses_what_it_cannot_answer(change: dict[str, object], reason: str, said: str) -> None:
    from cp_wire.errors import KvloomError

    async with sides(side(2, 1, 4), side(1, 4, 4), 33) as both:
        source = both.servicers[1]._source
        good = pb.FetchRequest(
            session=SESSION, attempt=1, epoch=3, instance=source.place.instance, generation=1, target_rank=0, start=0, end=9,
            message_bytes=1000, messages=[0], target=pb.KvSide(tp=1, pcp=1, dcp=1, interleave=4, block_size=4),
        )  # fmt: skip
        source.open(good)
        bad = pb.FetchRequest()
        bad.CopyFrom(good)
        for field in change:
            bad.ClearField(field)  # type: ignore[arg-type]
        bad.MergeFrom(pb.FetchRequest(**change))  # type: ignore[arg-type]
        with pytest.raises(KvloomError) as refused:
            source.open(bad)
        assert refused.value.reason == reason and said in refused.value.message


async def test_an_attempt_that_was_replaced_is_refused_even_in_its_middle() -> None:
    from cp_wire.errors import Stale

    async with sides(side(1, 4, 4), side(1, 4, 4), 33) as both:
        source = both.servicers[0]._source
        fields: dict[str, object] = dict(  # noqa: C408
            session=SESSION, epoch=3, instance=source.place.instance, generation=1, target_rank=0, start=0, end=33,
            message_bytes=64, messages=[0, 1], target=pb.KvSide(tp=1, pcp=1, dcp=1, interleave=4, block_size=4),
        )  # fmt: skip
        first = source.open(pb.FetchRequest(attempt=1, **fields))  # type: ignore[arg-type]
        first.frame(0)
        source.open(pb.FetchRequest(attempt=2, **fields))  # type: ignore[arg-type]
        with pytest.raises(Stale, match="attempt 1 of transfer 77 was replaced"):
            first.frame(1)
        with pytest.raises(Stale, match="attempt 1 of transfer 77 was replaced"):
            source.open(pb.FetchRequest(attempt=1, **fields))  # type: ignore[arg-type]


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


async def test_h9_expiry_is_reported_without_anybody_asking() -> None:
    async with sides(*PAIR, 9, ttl_s=10) as both:
        told: asyncio.Queue[list[Ended]] = asyncio.Queue()
        sweeping = asyncio.create_task(sweep(both.leases[0], told.put_nowait, 0.001))
        both.clock.now += 10
        async with asyncio.timeout(DEADLINE_S):
            (ended,) = await told.get()
        sweeping.cancel()
        assert (ended.how, list(ended.blocks)) == ("expired", both.sources[0].blocks)


def test_a_pool_of_another_shape_than_the_layout_says_is_refused() -> None:
    from cp_wire.errors import ConfigRefused
    from kv_transfer.facts import Place, facts_of
    from kv_transfer.store import Geometry

    place = Place(side(1, 4, 4, tp=1, kv_heads=2), 0, "i", "")
    facts_of(place, Geometry(2, 3, 4, 2, 8), "m", "d")
    with pytest.raises(ConfigRefused, match="heads 1, the layout of rank 0 2"):
        facts_of(place, Geometry(2, 3, 4, 1, 8), "m", "d")
    with pytest.raises(ConfigRefused, match="block size 8, the layout of rank 0 4"):
        facts_of(place, Geometry(2, 3, 8, 2, 8), "m", "d")
    assert Side(place.side.grid, Layout(1, 4, 4), 2) == place.side


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
