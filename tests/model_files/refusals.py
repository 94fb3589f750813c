"""How opening a model is refused."""

from pathlib import Path

import pytest

from model_files import ModelRefused, open_model


def refusal(path: Path) -> str:
    """The one line that says why a model is not opened."""
    with pytest.raises(ModelRefused) as caught:
        open_model(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)
