"""Device and collectives are settled together."""

import pytest

from cp_wire.effective import settle
from cp_wire.errors import ConfigRefused
from cp_wire.pb import common_pb2
from model_files import open_model
from tests.model_files.tiny_checkpoint import write_gguf


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    return open_model(write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")).shape


def settled(shape, **fields):
    return settle(common_pb2.ClusterConfig(tp=1, pcp=1, dcp=1, dp=1, block_size=16, **fields), shape)


@pytest.mark.parametrize(
    ("device", "collectives", "chosen"),
    [
        ("", "", ("cpu", "gloo")),
        ("auto", "auto", ("cpu", "gloo")),
        ("cpu", "shm", ("cpu", "shm")),
        ("cuda", "auto", ("cuda", "nccl")),
        ("cuda", "nccl", ("cuda", "nccl")),
    ],
)
def test_auto_follows_the_device(shape, device, collectives, chosen):
    got = settled(shape, device=device, collectives=collectives)
    assert (got.device, got.collectives) == chosen


@pytest.mark.parametrize(
    ("device", "collectives", "said"),
    [
        ("tpu", "auto", "device tpu is not one of cpu, cuda"),
        ("cuda", "gloo", "collectives gloo can't exchange tensors of device cuda"),
        ("cuda", "shm", "collectives shm can't"),
        ("cpu", "nccl", "collectives nccl can't exchange tensors of device cpu"),
        ("auto", "nccl", "collectives nccl can't exchange tensors of device cpu"),
    ],
)
def test_j2_what_does_not_fit_is_refused_by_name(shape, device, collectives, said):
    with pytest.raises(ConfigRefused, match=said):
        settled(shape, device=device, collectives=collectives)
