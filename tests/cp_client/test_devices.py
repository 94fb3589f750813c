"""Which device `kvloom up` chooses, and what it says when there is none."""

import ctypes
import subprocess

import pytest

from cp_client import devices
from cp_client.devices import local_device, local_gpus
from cp_wire.errors import ConfigRefused


@pytest.mark.parametrize(
    ("asked", "ranks", "gpus", "chosen"),
    [
        ("auto", 1, (0, "none"), "cpu"),
        ("auto", 2, (2, ""), "cuda"),
        ("auto", 3, (2, ""), "cpu"),
        ("cpu", 1, (8, ""), "cpu"),
        ("cuda", 2, (2, ""), "cuda"),
    ],
)
def test_the_choice(monkeypatch, asked, ranks, gpus, chosen):
    monkeypatch.setattr(devices, "local_gpus", lambda: gpus)
    assert local_device(asked, ranks) == chosen


def test_j2_a_gpu_that_is_absent_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(devices, "local_gpus", lambda: (0, "it was sold"))
    with pytest.raises(ConfigRefused, match="device cuda is absent: it was sold"):
        local_device("cuda", 1)
    monkeypatch.setattr(devices, "local_gpus", lambda: (2, ""))
    with pytest.raises(ConfigRefused, match="each rank needs a GPU, 3 in all, this host has 2"):
        local_device("cuda", 3)


def test_without_a_driver_nobody_is_asked(monkeypatch):
    monkeypatch.setattr(devices, "DRIVER", "libnothing-of-the-kind.so.1")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("asked"))
    assert local_gpus() == (0, "this host has no NVIDIA driver (libnothing-of-the-kind.so.1)")


@pytest.mark.parametrize(
    ("said", "understood"),
    [
        ('[2, ""]', (2, "")),
        ('[0, "torch is built without CUDA"]', (0, "torch is built without CUDA")),
        ("nonsense", (0, "torch can't be asked for GPUs (JSONDecodeError)")),
    ],
)
def test_with_a_driver_torch_is_asked(monkeypatch, said, understood):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda command, **kwargs: subprocess.CompletedProcess(command, 0, said, ""))
    assert local_gpus() == understood


def test_torch_that_does_not_answer_is_no_gpu(monkeypatch):
    def fail(command, **kwargs):
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(subprocess, "run", fail)
    assert local_gpus() == (0, "torch can't be asked for GPUs (TimeoutExpired)")


@pytest.mark.cluster
def test_torch_of_this_environment_answers(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    count, reason = local_gpus()
    assert (count == 0) == (reason != "") and "torch can't be asked" not in reason
