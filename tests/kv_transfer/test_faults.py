"""Messages that are flipped, dropped, repeated, reordered, cut off or misnumbered: never a wrong byte, never a leak."""

import random
from collections.abc import Callable

import grpc
import numpy as np
import pytest

from cp_layout.reshard import reshard
from kv_transfer import framing
from kv_transfer.incoming import Incoming
from kv_transfer.pull import Limits, Pull, Report, TransferFailed
from kv_transfer.service import KvTransferServicer
from tests.kv_transfer.cluster import SESSION, Rank, Sides, encode, side, sides
from tests.kv_transfer.faults import Faulty, drop, duplicate, flip, lying_index, stale, truncate, wrong_index

FAULTS = 1000
FAULTS_PER_RUN = 20


def check_no_leaks(both: Sides) -> None:
    for leases in both.leases:
        assert leases.active == 0
        assert len(leases.take_ended()) == 1 and leases.take_ended() == []
    assert all(puller._target.budget.held == 0 for puller in both.pullers)


@pytest.mark.parametrize("seed", range(FAULTS // FAULTS_PER_RUN))
async def test_a_thousand_faults_write_no_wrong_byte_and_leak_nothing(seed: int) -> None:
    rng, budget, done = random.Random(seed), [FAULTS_PER_RUN], dict[str, int]()
    limits = Limits(message_bytes=rng.choice([64, 256, 1000]), attempts=50)
    pair = rng.choice([(side(2, 1, 4), side(1, 16, 16)), (side(1, 4, 4, kv_heads=2), side(2, 2, 4, kv_heads=2))])
    async with sides(*pair, 200, limits=limits, servicer=lambda source: Faulty(source, rng, budget, done)) as both:
        while budget[0]:
            reports = await both.move()
            both.check()
            for target in both.targets:
                target.pool[:] = -1
        assert sum(done.values()) == FAULTS_PER_RUN
        await both.release()
        check_no_leaks(both)
    assert all(report.corrupted + report.stale + report.duplicates <= 4 * FAULTS_PER_RUN for report in reports)


@pytest.mark.parametrize(
    ("fault", "counted"),
    [
        (flip, "corrupted"),
        (truncate, "corrupted"),
        (wrong_index, "corrupted"),
        (lying_index, "corrupted"),
        (stale, "stale"),
        (duplicate, "duplicates"),
        (drop, "retries"),
    ],
)
async def test_every_kind_of_fault_is_counted_as_what_it_is(
    fault: Callable[[bytes, random.Random], list[bytes]], counted: str
) -> None:
    class Once(KvTransferServicer):
        left = 1

        async def send(self, frame: bytes, context: grpc.aio.ServicerContext) -> None:
            self.left, spoil = 0, self.left
            for each in fault(frame, random.Random(5)) if spoil else [frame]:
                await super().send(each, context)

    async with sides(side(1, 4, 4), side(1, 4, 4), 40, servicer=Once) as both:
        (report,) = await both.move()
        both.check()
        assert getattr(report, counted) >= 1
        assert report.retries == (fault is not duplicate)


async def test_h20_faults_that_do_not_end_fail_the_pull_and_say_what_arrived() -> None:
    class Never(KvTransferServicer):
        async def send(self, frame: bytes, context: grpc.aio.ServicerContext) -> None:
            if framing.decode(frame).header.message == 1:
                (frame,) = flip(frame, random.Random(3))
            await super().send(frame, context)

    async with sides(side(1, 4, 4), side(1, 4, 4), 40, servicer=Never) as both:
        with pytest.raises(TransferFailed) as failed:
            await both.move()
    assert failed.value.reason == "CORRUPTED"
    message = str(failed.value)
    for words in ("transfer 77", "10 blocks", "source rank 0 at 127.0.0.1:", "attempt 3", "1 of 5 messages", "1024 bytes in 4"):
        assert words in message
    assert (failed.value.report.corrupted, failed.value.report.retries) == (3, 2)


def test_nothing_is_written_for_a_message_that_was_written_before() -> None:
    """A repeated message must not touch a pool whose tokens decode may already have moved on from."""
    own = side(1, 4, 4)
    rank = Rank.make(own, 0, 8, name="target")
    pull = Pull(SESSION, 3, own, own, 0, 8, rank.blocks, rank.generations.now(), {})
    plan, report = reshard(own, own, 0, 8), Report()
    incoming = Incoming(pull, plan.links[0], plan.runs_of(plan.links[0]), rank.store, rank.generations, 1 << 20, report)
    incoming.begin(1, 9)
    payload = np.arange(8 * 4, dtype=np.int64).tobytes()
    frame = framing.decode(encode(framing.Header(framing.Stream(SESSION, 1, 3, 9, 0, 0, 0, 8), 0, 0, 32), payload))
    incoming.take(frame)
    rank.pool[:] = 5
    incoming.take(frame)
    assert (rank.pool == 5).all() and (report.messages, report.duplicates) == (1, 1)
