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
    def read_rows(self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> np.ndarray:
        """Rows [start, stop) of a tensor (elements of a vector) as a fresh float32 array in Hugging Face order.

        Only the bytes of those rows are read. columns: half-open range, of a matrix only; then only those columns are, rounded
        to the pages of the file that hold them, and in a quantised tensor to whole quantisation blocks. `KeyError` for an
        unknown name, `ValueError` for a range outside the tensor.
        """

    def _checked_rows(self, name: str, start: int, stop: int, columns: tuple[int, int] | None) -> TensorInfo:
        tensor = self.tensors[name]
        if not 0 <= start <= stop <= tensor.shape[0]:
            raise ValueError(f"rows {start}..{stop} of {name} do not exist, it has {tensor.shape[0]}")
        if columns is not None and not (len(tensor.shape) == 2 and 0 <= columns[0] <= columns[1] <= tensor.shape[1]):
            raise ValueError(f"columns {columns[0]}..{columns[1]} of {name} do not exist, its shape is {list(tensor.shape)}")
        return tensor
