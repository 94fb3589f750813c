"""Ends that do not fit together: handshakes, plans and calls that are refused, by the name of what differs."""

from collections.abc import Callable

import pytest

from cp_layout.interleave import Layout
from cp_layout.reshard import Side
from cp_wire.errors import ConfigRefused, KvloomError, Stale
from cp_wire.pb import kv_transfer_pb2 as pb
from kv_transfer.facts import Place, facts_of
from kv_transfer.store import Geometry
from tests.kv_transfer.cluster import SESSION, Sides, side, sides
from tests.kv_transfer.failing import PAIR, failure


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


def test_a_pool_of_another_shape_than_the_layout_says_is_refused() -> None:

    place = Place(side(1, 4, 4, tp=1, kv_heads=2), 0, "i", "")
    facts_of(place, Geometry(2, 3, 4, 2, 8), "m", "d")
    with pytest.raises(ConfigRefused, match="heads 1, the layout of rank 0 2"):
        facts_of(place, Geometry(2, 3, 4, 1, 8), "m", "d")
    with pytest.raises(ConfigRefused, match="block size 8, the layout of rank 0 4"):
        facts_of(place, Geometry(2, 3, 8, 2, 8), "m", "d")
    assert Side(place.side.grid, Layout(1, 4, 4), 2) == place.side
