"""A small checkpoint as Hugging Face stores it."""

from pathlib import Path

import pytest

from tests.model_files.tiny_checkpoint import write_hf


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "tiny")
