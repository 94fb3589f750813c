"""Exceptions survive the wire in both shapes of call."""

import grpc
import pytest
from google.rpc import status_pb2

from cp_wire import channels, errors
from cp_wire.pb import coordinator_pb2, coordinator_pb2_grpc
from tests.cp_wire.services import Echo, serving

SAMPLES = [
    errors.InvalidRequest("top_p", 1.5, "must be in (0, 1]"),
    errors.Duplicate("request r1 is active"),
    errors.Unknown("no model fox here"),
    errors.MessageTooLarge("too much"),
    errors.Exhausted("the queue is full", retry_after_s=0.25),
    errors.Unavailable("rank 1 was lost", retry_after_s=1.5),
    errors.Cancelled("cancelled"),
    errors.DeadlineExceeded("too late"),
    errors.ConfigRefused("rank 1 speaks protocol 7"),
    errors.Stale("transfer 7 is of epoch 2"),
    errors.LeaseEnded("the lease of transfer 7 is expired"),
    errors.PortInUse("127.0.0.1", 80),
    errors.Internal("oops"),
]


def test_the_table_is_covered_and_unambiguous():
    assert [type(error) for error in SAMPLES] == list(errors.TABLE)
    assert len({cls.reason for cls in errors.TABLE}) == len(errors.TABLE)


@pytest.mark.parametrize("method", ["Generate", "Abort"])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda error: type(error).__name__)
async def test_l3_round_trip(sample, method):
    async with serving(Echo(sample)) as (_, address), channels.open_channel(address, "control") as channel:
        stub = coordinator_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            if method == "Abort":
                await stub.Abort(coordinator_pb2.AbortRequest(), timeout=5)
            else:
                async for _ in stub.Generate(coordinator_pb2.GenerateRequest(), timeout=5):
                    pass
    got = errors.from_rpc_error(caught.value)
    assert type(got) is type(sample)
    assert vars(got) == {**vars(sample), "is_told": True}


async def test_a_foreign_exception_shows_its_type_only():
    failure = FileNotFoundError("/secret/place")
    async with serving(Echo(failure)) as (_, address), channels.open_channel(address, "control") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await coordinator_pb2_grpc.InferenceServiceStub(channel).Abort(coordinator_pb2.AbortRequest(), timeout=5)
    got = errors.from_rpc_error(caught.value)
    assert isinstance(got, errors.Internal)
    assert "FileNotFoundError" in got.message
    assert "secret" not in got.message


@pytest.mark.parametrize(
    ("code", "cls", "retryable"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest, False),
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.MessageTooLarge, False),
        (grpc.StatusCode.CANCELLED, errors.Cancelled, False),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded, True),
        (grpc.StatusCode.UNIMPLEMENTED, errors.Internal, False),
    ],
)
def test_a_status_without_details_is_understood_by_its_code(code, cls, retryable):
    error = errors.from_status(status_pb2.Status(code=code.value[0], message="plain"))
    assert type(error) is cls
    assert error.retryable is retryable
    assert "plain" in error.message


def test_a_long_value_is_shortened():
    error = errors.InvalidRequest("stop", "x" * 10_000_000, "at most 256 characters")
    assert len(error.message) < 120
    assert error.message.startswith("stop is xxx")
    assert error.message.endswith("at most 256 characters")


@pytest.mark.parametrize(("host", "shown"), [("::1", "[::1]:80"), ("127.0.0.1", "127.0.0.1:80"), ("owl", "owl:80")])
def test_an_address_that_is_taken_is_shown_as_one_types_it(host, shown):
    assert errors.PortInUse(host, 80, "so it is").message == f"cannot listen on {shown}: so it is"
