"""The one way in: a path becomes an opened model or a one-sentence refusal."""

from pathlib import Path

from model_files.errors import ModelRefused
from model_files.gguf_model import open_gguf
from model_files.hf_model import open_hf
from model_files.model import ModelFiles


def open_model(path: str | Path) -> ModelFiles:
    """Open a Hugging Face directory (config.json, safetensors, tokenizer.json) or a GGUF file.

    `ModelRefused` for a path that does not exist, is neither, is damaged or truncated, or describes a model of no
    supported family.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return open_hf(path)
        if path.is_file():
            return open_gguf(path)
    except OSError as error:
        raise ModelRefused(f"{path}: cannot be read ({error.strerror or error})") from error
    raise ModelRefused(f"{path}: no such model, expected a directory with config.json or a GGUF file")
