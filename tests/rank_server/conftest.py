"""The tiny model of the executor's tests; a rank for those of its service; numbers of threads for kernels that use torch's."""

import pytest
import torch

from model_files import open_model
from tests.rank_server.lanes import answering


@pytest.fixture
def path(tiny):
    """8 Q heads, 2 KV heads, 2 layers."""
    return tiny()


@pytest.fixture
def files(path):
    return open_model(path)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    """torch's number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
async def rank():
    """See `lanes.answering`."""
    async with answering() as running:
        yield running
