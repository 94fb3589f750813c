"""Seeded models, built once per run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import build_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny(heads=8, kv_heads=2, …) → directory; the same arguments give the same directory."""
    built: dict[tuple[tuple[str, object], ...], Path] = {}

    def build(**shape: object) -> Path:
        key = tuple(sorted(shape.items()))
        if key not in built:
            built[key] = build_tiny_llama(tmp_path_factory.mktemp("tiny"), **shape)  # type: ignore[arg-type]
        return built[key]

    return build
