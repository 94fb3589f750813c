"""The tiny model of the executor's tests."""

import pytest

from model_files import open_model


@pytest.fixture
def path(tiny):
    """8 Q heads, 2 KV heads, 2 layers."""
    return tiny()


@pytest.fixture
def files(path):
    return open_model(path)
