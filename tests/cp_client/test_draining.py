"""What is said about the requests of a cluster that is stopped."""

import pytest

from cp_client.draining import tell_of_requests
from cp_wire.pb import coordinator_pb2 as pb
from tests.cp_client.fake_coordinator import FakeCoordinator, running


@pytest.mark.parametrize(
    ("active", "said"),
    [
        ({"running": 2, "waiting": 1}, "kvloom: draining 3 requests, Ctrl-C again to force the end\n"),
        ({"waiting": 1}, "kvloom: draining 1 request, Ctrl-C again to force the end\n"),
        ({}, ""),
    ],
)
async def test_requests_that_a_stop_waits_for_are_counted(active, said, capsys):
    fake = FakeCoordinator()
    fake.status = pb.GetStatusResponse(**active)
    with running(fake) as address:
        await tell_of_requests(address)
    assert capsys.readouterr().err == said


async def test_nothing_is_said_of_a_coordinator_that_has_gone(capsys):
    await tell_of_requests("127.0.0.1:1")
    assert capsys.readouterr().err == ""
