"""Seeded models, built once per run; processes under test hear SIGINT however the run itself was started."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Triton decides at its import whether kernels are compiled or interpreted, and anything may import it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.tiny_models import build_tiny_model

# No property depends on how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def sigint_is_heard() -> None:
    """A shell starts its background jobs with SIGINT ignored, an event loop that has ended leaves it so: and what is ignored
    stays so in every process below."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny(family="qwen3", kv_heads=2, …) → directory; the same arguments give the same directory."""
    built: dict[str, Path] = {}

    def build(**shape: object) -> Path:
        key = json.dumps(shape, sort_keys=True)
        if key not in built:
            built[key] = build_tiny_model(tmp_path_factory.mktemp("tiny"), **shape)  # type: ignore[arg-type]
        return built[key]

    return build
