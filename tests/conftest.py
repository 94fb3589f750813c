"""Seeded models, built once per run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import build_tiny_model


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
