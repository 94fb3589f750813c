"""A coordinator with a script, and its address."""

import pytest

from tests.cp_client.fake_coordinator import WHOLE, FakeCoordinator, running


@pytest.fixture
def fake():
    return FakeCoordinator(WHOLE)


@pytest.fixture
def target(fake):
    with running(fake) as address:
        yield address
