"""What a model's files say, whichever format they have."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from tokenizers import Tokenizer

from cp_layout.model_shape import ModelShape
from model_files.tensors import TensorInfo, checkpoint_hash


@dataclass(frozen=True)
class ModelFiles(ABC):
    """An opened, checked model: every tensor of the shape is there, whole, with the right dimensions.

    Opening reads headers only; the tokenizer is built on first use.
    """

    kind: ClassVar[Literal["hf", "gguf"]]

    path: Path
    name: str
    shape: ModelShape
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat_template: str | None
    tensors: Mapping[str, TensorInfo]
    """By canonical Hugging Face name, in the order of `expected_tensors`."""

    @cached_property
    def hash(self) -> str:
        """Identity of the checkpoint's structure: SHA-256 hex, equal on every host that has the same files."""
        return checkpoint_hash(self.shape, self.tensors)

    @property
    @abstractmethod
    def special_tokens(self) -> dict[str, str]:
        """Role → text of the special tokens that a chat template may name: bos_token, eos_token, unk_token, pad_token."""

    @property
    @abstractmethod
    def add_bos(self) -> bool:
        """Whether a plain text prompt starts with the BOS token."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built once; `ModelRefused` when the files do not describe one that is supported."""

    @abstractmethod
    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor (elements of a vector) as a fresh float32 array in Hugging Face order.

        Only the bytes of those rows are read. `KeyError` for an unknown name, `ValueError` for a range outside the tensor.
        """

    def _checked_rows(self, name: str, start: int, stop: int) -> TensorInfo:
        tensor = self.tensors[name]
        if not 0 <= start <= stop <= tensor.shape[0]:
            raise ValueError(f"rows {start}..{stop} of {name} do not exist, it has {tensor.shape[0]}")
        return tensor
